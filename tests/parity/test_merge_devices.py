"""A merge on a GPU is that of the CPU, but for the rounding of float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.adapter_tools.low_rank import Factors, nearest
from services.adapter_tools.merge import Merged, merge_layer, working_bytes
from services.adapter_tools.sparse import Weighted, merged_entries
from services.adapter_tools.workshop import ALONE, Workshop
from services.common.adapters.names import AdapterVersion
from services.common.jobs import MergeJob, MergeSettings
from services.engine.compute_sharing.device_order import StreamGate
from services.engine.compute_sharing.device_queue import CudaDeviceQueue
from services.engine.models.lora.binding import bind_adapter
from services.trainer.jobs.merge import MergeRun
from services.trainer.memory.budget import MemoryBudget
from services.trainer.parent_versions import ParentVersion
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.conftest import Pair

pytestmark = pytest.mark.cuda
SHAPES = [(1536, 640), (640, 1536)]
METHODS = ["ties", "dare_linear", "dare_ties"]


def gate() -> StreamGate:
    """Gate of a pod whose engine is idle."""
    engine = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return StreamGate(0.02, CudaDeviceQueue(lambda: engine), CudaDeviceQueue(torch.cuda.current_stream))


def parents(shape: tuple[int, int]) -> list[Weighted]:
    """Two, each with four directions far above the noise that dropping and trimming add."""
    made = []
    for place in range(2):
        generator = torch.Generator().manual_seed(place)
        a = torch.randn(4, shape[1], generator=generator, dtype=torch.float64)
        b = torch.randn(shape[0], 4, generator=generator, dtype=torch.float64)
        made.append(Weighted(Factors(a, b), (1.0, 0.8)[place], place))
    return made


def merge_settings(method: str) -> MergeSettings:
    sources = [{"adapter": "one"}, {"adapter": "two", "weight": 0.8}]
    return MergeSettings.model_validate({"sources": sources, "method": method, "rank": 8, "density": 0.6})


def product(merged: Merged) -> torch.Tensor:
    return merged.b.double() @ merged.a.double()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_layers_are_those_of_the_cpu(method: str, shape: tuple[int, int]) -> None:
    settings = merge_settings(method)
    there_shop = Workshop(torch.device("cuda"), gate(), numbers=100_000)
    there_entries = merged_entries("layers.0.x", parents(shape), settings, 1, there_shop).cpu()
    here_entries = merged_entries("layers.0.x", parents(shape), settings, 1, ALONE)
    # An entry within rounding of a threshold, or a sum within rounding of 0, may fall to either side.
    other = (there_entries - here_entries).abs() > 1e-4 * here_entries.abs().max()
    assert int(other.sum()) <= 5
    assert int(((there_entries != 0) != (here_entries != 0)).sum()) <= 5

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    there = merge_layer("layers.0.x", parents(shape), settings, 1, there_shop)
    assert torch.cuda.max_memory_allocated() - before <= working_bytes(shape, 2, settings, there_shop)
    here = merge_layer("layers.0.x", parents(shape), settings, 1)
    assert there.a.device == there.b.device == torch.device("cpu")
    assert there.error == pytest.approx(here.error, rel=1e-5)
    assert float((product(there) - product(here)).norm() / product(here).norm()) < 1e-4
    exact = here_entries.double()
    smallest = float(torch.linalg.svdvals(exact)[8:].norm())
    assert float((product(there) - exact).norm()) <= smallest * (1 + 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_flat_spectra_leave_as_little(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = nearest(matrix.cuda(), 16, Workshop(torch.device("cuda"), gate()))
    smallest = float(torch.linalg.svdvals(matrix.double())[16:].norm())
    assert float((matrix.double() - found.dense()).norm()) <= smallest * (1 + 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_job_on_a_gpu_is_that_of_the_cpu(pairs: dict[str, Pair], tmp_path: Any, method: str) -> None:
    pair = pairs["grouped"]
    files = []
    for seed in (1, 2):
        make_adapter(pair.path, tmp_path / str(seed), seed=seed)
        files.append(adapter_files(tmp_path / str(seed)))
    origins = [ParentVersion(AdapterVersion(f"p{n}", 1), f"digest-{n}", part) for n, part in enumerate(files)]
    sources = [{"adapter": f"p{n}@1"} for n in range(2)]
    spec = MergeJob.model_validate(
        {"adapter": "merged", "sources": sources, "method": method, "rank": 6, "density": 0.9}
    )
    found = []
    for device in ("cpu", "cuda"):
        host: Any = SimpleNamespace(
            model=SimpleNamespace(config=pair.model.config, device=torch.device(device)),
            gate=gate(),
            max_lora_rank=32,
            train_memory_bytes=2**30,
            memory_budget=MemoryBudget(2**30),
        )
        run = MergeRun(spec, host, origins)
        for index in range(run.total_steps):
            metrics = run.step(index)
        bound = bind_adapter(run.lora.to_files("base"), pair.model.config, max_rank=32)
        found.append((metrics, {path: t.b.double() @ t.a.double() for path, t in bound.targets.items()}))
    (here_metrics, here), (there_metrics, there) = found
    assert there.keys() == here.keys()
    assert there_metrics == pytest.approx(here_metrics, rel=1e-3)
    for path, delta in here.items():
        norm = float(delta.norm())
        assert float(there[path].norm()) == pytest.approx(norm, rel=1e-3), path
