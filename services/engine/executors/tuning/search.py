"""A search over the decode steps of a runner, and its results put to use."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
import torch
import triton

import kernels.gpu
from kernels.gpu.configs import KernelConfigs, Product
from kernels.gpu.linear.skinny import MAX_ROWS
from kernels.gpu.linear.skinny_configs import SkinnyConfig, most_rows
from services.engine.executors.compiler_pool import CompilerPool
from services.engine.executors.cuda.compile_ahead import Compiling
from services.engine.executors.cuda.runner import CudaRunner
from services.engine.executors.tuning import candidates
from services.engine.executors.tuning.bench import CapturedSteps
from services.engine.executors.tuning.choice import Config, Subject, put
from services.engine.executors.tuning.results import Identity, Outcome
from services.engine.executors.tuning.tuner import Band, Proposal, Tuner
from services.engine.models.cuda_graphs import no_collection
from services.engine.models.device_batch import DeviceCache
from services.engine.models.interface import CausalLM
from services.engine.models.lora.slots import LoraSlots

log = structlog.get_logger(__name__)

_MAIN = (1, 8, 64)
"""Numbers of rows that are searched first: one answer, a few, and as many as the products that stream take."""
_ATTENTION = 0.15
"""Share of a step that attention is taken for."""
_DRIVER = Path("/proc/driver/nvidia/version")
_KERNELS = Path(kernels.gpu.__file__).parent


class Proposals:
    """Candidates of a model on a device.

    Args:
        asked: the products of each number of rows, see KernelConfigs.asked().
    """

    def __init__(
        self, kernels: KernelConfigs, cache: DeviceCache, asked: Mapping[int, Counter[tuple[Product, bool]]]
    ) -> None:
        self._kernels, self._cache = kernels, cache
        self._shares: dict[tuple[int, Subject], float] = {}
        self._asked = asked

    def first(self, rows: int) -> list[Proposal]:
        """Candidates around what the table has."""
        found: list[Proposal] = []
        device, asked = self._kernels.device, self._asked[rows]
        whole = sum(count * candidates.nbytes(product) for (product, _), count in asked.items())
        for (product, swiglu), count in asked.items():
            share = self._shares[rows, product] = count * candidates.nbytes(product) / whole
            now: SkinnyConfig | None = None
            if rows <= most_rows(product.outputs, product.inputs, product.kind, device):
                now = self._kernels.table(rows, product, swiglu=swiglu)
                found += _ranked(product, candidates.neighbours(now, rows, product, device), share)
            found += _ranked(product, candidates.others(now, rows, product, device), 0.6 * share)
        if self._cache.pages:
            table = self._kernels.decode(self._cache.pages[0], rows)
            found += self.around(rows, "attention", table)
        return found

    def around(self, rows: int, subject: Subject, config: Config) -> Iterator[Proposal]:
        """Candidates around what was kept."""
        device = self._kernels.device
        if isinstance(subject, Product):
            if isinstance(config, SkinnyConfig):
                share = self._shares[rows, subject]
                yield from _ranked(subject, candidates.neighbours(config, rows, subject, device), share)
        elif config is not None and not isinstance(config, SkinnyConfig):
            heads = self._cache.pages[0].kv_heads
            yield from _ranked("attention", candidates.attention(config, rows, heads, device), _ATTENTION)


def _ranked(subject: Subject, configs: Iterable[Config], share: float) -> Iterator[Proposal]:
    """The earlier of a list promise more."""
    for index, config in enumerate(configs):
        yield Proposal(subject, config, share * (1 + index) ** -0.5)


def search(
    runner: CudaRunner,
    model: CausalLM,
    cache: DeviceCache,
    lora: LoraSlots,
    *,
    max_model_len: int,
    seconds: float,
    told: Callable[[float, str], None] = lambda _seconds, _text: None,
) -> Outcome:
    """Searches for faster decode steps, before the runner captures its own.

    Args:
        seconds: most time that it takes; compiling the table's own kernels, which the start needs anyway, not counted.
        told: see Tuner.
    """
    kernels_used = model.kernel_configs()
    sizes = [rows for rows in runner.decode_sizes if rows <= MAX_ROWS]
    compilers = CompilerPool()
    with no_collection():
        bench = CapturedSteps(runner, kernels_used, cache, lora, Compiling(compilers), max_model_len=max_model_len)
        try:
            proposals = Proposals(kernels_used, cache, bench.prepare(sizes))
            began = time.monotonic()
            tuner = Tuner(
                bench,
                {rows: proposals.first(rows) for rows in sizes},
                main=[rows for rows in _MAIN if rows in sizes],
                propose=proposals.around,
                clock=time.monotonic,
                seconds=seconds,
                adapters=bench.adapters,
                told=told,
                ahead=max(8, len(os.sched_getaffinity(0))),
            )
            bands = tuner.run()
            took = time.monotonic() - began
        finally:
            put(kernels_used.tuned, sizes, {})
            bench.close()
            compilers.end()
    return Outcome(bands, took, tuner.trials)


def use(kernels: KernelConfigs, bands: Sequence[Band]) -> None:
    """Has steps run as was found: those of a captured number of rows, and products of rows up to it from the captured
    number before, which the head has where fewer sequences run."""
    before = 0
    for band in sorted(bands, key=lambda band: band.rows):
        put(kernels.tuned, range(before + 1, band.rows + 1), band.choice)
        before = band.rows


def identity_of(model: CausalLM, cache: DeviceCache, *, pdl: bool, temper: str) -> Identity:
    """Identity of what would be measured for a model that is loaded."""
    config, device = model.config, model.kernel_configs().device
    shapes = {tuple(shape) for layer in range(config.num_layers) for shape in config.linear_shapes(layer).values()}
    pages = cache.pages[0] if cache.pages else None
    return Identity(
        place={
            "device": device.name,
            "capability": list(device.capability),
            "multiprocessors": device.multiprocessors,
            "shared_memory": device.shared_memory,
            "architecture": type(model).__name__,
            "layers": config.num_layers,
            "vocabulary": config.vocab_size,
            "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
            "shapes": [list(shape) for shape in sorted(shapes)],
            "weights": model.nbytes(),
            "dtype": str(model.dtype),
            "pages": None if pages is None else [str(pages.keys.dtype), pages.block_size],
            "states": str(cache.recurrent.dtype),
            "programmatic_launch": pdl,
        },
        software={
            "temper": temper,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "driver": driver_version(),
            "kernels": sources_digest(),
        },
    )


def driver_version() -> str:
    """Version of the GPU's driver as its kernel module tells it; empty where it does not."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def sources_digest(directory: Path = _KERNELS) -> str:
    """Digest of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(str(path.relative_to(directory)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
