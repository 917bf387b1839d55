"""Every kernel variant that an engine's start and a training job launch on an architecture: written down on the CPU, by
the engine's own runner and the trainer's own forward, whose launches do not happen.

A process that writes variants down must not interpret (TRITON_INTERPRET), and stays with its architecture: kernels
remember the first target that they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice, repeat
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.kernels.launches import no_products, replaced
from benchmarks.lib.random_checkpoint import config_of
from benchmarks.lib.random_model import RandomWeights
from kernels.gpu.configs import KernelConfigs
from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.chunk_configs import FEW, many, pieces_of
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.skinny import SplitWorkspace
from kernels.gpu.segments import TILE, Segments
from kernels.gpu.train.divergence import divergence
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.head import token_scores
from kernels.quantize import GROUP, Fp8Weight, Int4Weight
from services.common.adapters.drafter_form import DrafterForm
from services.common.jobs import LoraSettings
from services.engine.executors.cuda import runner as runner_module
from services.engine.executors.cuda.cache_transfer import CudaCacheTransfer
from services.engine.executors.cuda.compile_ahead import Target, Variant, recorded
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
from services.engine.executors.cuda.shapes import verified_rows
from services.engine.executors.cuda.warm_up import sampling_plans
from services.engine.models.device_batch import DeviceCache
from services.engine.models.footprint import Quantization
from services.engine.models.interface import Recompute
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.lora.upload import AdapterUpload
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.qwen3_5.training.adapters import WorkingAdapter
from services.engine.models.qwen3_5.training.frozen import Float8Linear, FrozenLinears, matrices
from services.engine.models.qwen3_5.training.trunk import EagerStep, Trunk
from services.engine.models.weights import matrix as weight_matrices
from services.engine.models.weights.matrix import Matrix
from services.engine.scheduler.step_plan import StepPlan
from services.engine.settings import MOST_DRAFTED_ON_GPU
from services.pod.memory import WAITING_WRITES

_CPU = torch.device("cpu")
_SEQUENCES = 256
_LAYERS: Any = ("linear_attention", "linear_attention", "full_attention")
"""One of each kind of layer behind another launches every kernel."""
DENSE = replace(Qwen3_5Config.from_dict(config_of("qwen3.5-4b")), layer_types=_LAYERS)
EXPERTS = replace(Qwen3_5MoeConfig.from_dict(config_of("qwen3.5-35b-a3b")), layer_types=_LAYERS)


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of an engine's start that decide which kernels it launches."""

    name: str
    quantization: Quantization = "none"
    kv_float8: bool = False
    state_bfloat16: bool = False
    batch_invariant: bool = False
    speculative: bool = False
    block: int = 0
    """Tokens of a block drafter in the place of the mtp layer."""
    rank: int = 32
    """TEMPER_MAX_LORA_RANK."""
    config: Qwen3_5Config = DENSE
    trains_in_float8: bool = False
    samples: bool = False
    """With everything that a request may ask of the sampler, which the other settings do not change."""

    @property
    def form(self) -> DrafterForm:
        return DrafterForm(self.block)

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a chunk."""
        return min(self.form.most_tokens, MOST_DRAFTED_ON_GPU) if self.speculative else 0

    @property
    def float8(self) -> bool:
        """True if the device must have float8."""
        return self.kv_float8 or self.quantization == "fp8" or self.trains_in_float8


STARTS = (
    Start("bf16", samples=True),
    Start("int4", "int4", state_bfloat16=True),
    Start("fp8", "fp8", kv_float8=True),
    Start("mtp", speculative=True, samples=True),
    Start("fp8, mtp", "fp8", kv_float8=True, state_bfloat16=True, speculative=True),
    Start("block", speculative=True, block=16),
    Start("batch invariant", batch_invariant=True),
    Start("fp8, batch invariant", "fp8", batch_invariant=True),
    Start("35B-A3B, fp8", "fp8", config=EXPERTS),
    Start("35B-A3B, int4", "int4", config=EXPERTS),
    Start("bf16, kv fp8, rank 64", kv_float8=True, rank=64),
    Start("rank 8", rank=8),
)
"""Starts whose kernels together are all that engines launch, each with what its warm-up tries: sampling with everything
that a request may ask for, masks of constrained rows, prompts that are scored, several adapters, snapshots. A quantized
model's head is fp8 where the device has float8 (services.pod.memory.storage)."""
TRAINED = (
    Start("training"),
    Start("training in float8", trains_in_float8=True),
    Start("35B-A3B, training", config=EXPERTS),
    Start("35B-A3B, training on fp8", "fp8", config=EXPERTS),
    Start("35B-A3B, training on int4", "int4", config=EXPERTS),
)
"""Bases of training jobs. Of a quantized one torch decodes all matrices but the experts'."""
PIECES = (Start("pieces of prompts"), Start("pieces of prompts, bf16 states", state_bfloat16=True))
"""Prefills whose long chains are cut, which engines launch where kernels.gpu.delta.chunk_configs.TIMES says that it
pays."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def variants_of(cards: Sequence[DeviceLimits]) -> Iterator[tuple[str, list[Variant]]]:
    """Names of each start, then of training, and the variants that any of the cards launches.

    Args:
        cards: of one architecture.
    """
    driver.set_active(Target(GPUTarget("cuda", cards[0].architecture, 32)))
    for starts, launch in ((STARTS, _serve), (TRAINED, _train), (PIECES, _cut_up)):
        for start in starts:
            if cards[0].float8 or not start.float8:
                yield start.name, _recorded(launch, start, cards)


def _recorded(
    launch: Callable[[Start, KernelConfigs], None], start: Start, cards: Sequence[DeviceLimits]
) -> list[Variant]:
    decoders = patch.multiple(weight_matrices, dequantize_fp8=_decoded, dequantize_int4=_decoded)
    with recorded() as variants, _nothing_large(), decoders, torch.no_grad():
        for card in cards:
            launch(start, KernelConfigs(card))
    return variants


_LARGE = 1 << 18
_MADE = ("zeros", "ones")
_CHANGED = ("zero_", "fill_", "copy_", "add_")
_REDUCED = ("float", "gt", "sum", "topk")


@contextmanager
def _nothing_large() -> Iterator[None]:
    """Inside, torch neither fills nor reads a large tensor, nor multiplies matrices: nobody looks at the numbers, and
    touching gigabytes of caches and logits takes longer than all launches."""
    with no_products(), replaced((*_MADE, *_CHANGED, *_REDUCED), _unless_large):
        yield


def _unless_large(name: str, original: Any, *args: Any, **given: Any) -> Any:
    if name in _MADE:
        made = torch.empty(*args, **given)
        return made if made.numel() > _LARGE else original(*args, **given)
    first = args[0]
    if first.numel() <= _LARGE or given.get("out") is not None:
        return original(*args, **given)
    if name in _CHANGED:
        return first
    if name in ("float", "gt"):
        return torch.empty(first.shape, dtype=torch.float32 if name == "float" else torch.bool)
    if name == "sum":  # over the first or the last dimension
        return torch.empty(first[..., 0].shape if args[1] == -1 else first[0].shape, dtype=given["dtype"])
    shape = (*first.shape[:-1], args[1])
    return torch.empty(shape, dtype=first.dtype), torch.zeros(shape, dtype=torch.int64)


def _model(start: Start, kernels: KernelConfigs) -> Qwen3_5:
    made = RandomWeights(
        start.config,
        _CPU,
        start.quantization,
        SplitWorkspace.allocate(_CPU),
        empty=True,
        kernels=kernels,
        mtp=start.speculative,
        form=start.form,
        draft_head=start.speculative,
        invariant=start.batch_invariant,
    )
    weights = made.build()
    if start.quantization != "none" and not kernels.device.float8:
        weights = replace(weights, head=replace(made, quantization="none", mtp=False).build().head)
    return Qwen3_5(start.config, weights)


def _serve(start: Start, kernels: KernelConfigs) -> None:
    model = _model(start, kernels)
    cache = DeviceCache.allocate(
        start.config,
        torch.bfloat16,
        _CPU,
        num_blocks=64,
        block_size=16,
        num_slots=260,
        kv_dtype=torch.float8_e4m3fn if start.kv_float8 else None,
        state_dtype=torch.bfloat16 if start.state_bfloat16 else torch.float32,
        draft_layers=int(start.speculative),
        waiting_writes=WAITING_WRITES,
        verified_rows=verified_rows(_SEQUENCES, start.draft_tokens) if start.speculative else 0,
    )
    limits = RunnerLimits(_SEQUENCES, 8192, 1024, largest_graph=256, mixed_tokens=3840, draft_tokens=start.draft_tokens)
    lora = LoraSlots(start.config, 9, start.rank, torch.bfloat16, _CPU, invariant=start.batch_invariant)
    # On a GPU adapters reach their slots by a kernel.
    lora._upload = AdapterUpload(lora.target_buffers(), lora._output_order, lora.upload_bytes(start.config, start.rank))
    options = RunnerOptions(start.batch_invariant, pdl=kernels.device.programmatic_launch)
    runner = CudaRunner(model, cache, lora, limits, options, eos_token_ids=[1])
    plans = partial(_some_plans, every=start.samples)
    with torch.inference_mode(), patch.object(runner_module, "sampling_plans", plans):
        runner._launch_all(runner.warm_up_shapes, runner.forward.one_of_each_layer())
    CudaCacheTransfer(cache, runner.stream, start.name).warm_up()


def _some_plans(max_num_seqs: int, *, every: bool) -> Iterator[StepPlan]:
    """The first plan of each number of rows, or every one."""
    plans = groupby(sampling_plans(max_num_seqs), key=lambda plan: len(plan.chunks))
    return (plan for _, of_rows in plans for plan in islice(of_rows, None if every else 1))


def _train(start: Start, kernels: KernelConfigs) -> None:
    config, model = start.config, _model(start, kernels)
    lora = LoraParams.create(config, LoraSettings(rank=16))
    linears = None
    if start.trains_in_float8:
        linears = [
            FrozenLinears(*map(_float8, matrices(layer), repeat(kernels.device))) for layer in model.weights.layers
        ]
    for documents in _documents():
        tokens = torch.zeros(len(documents.positions), dtype=torch.int64)
        for adapter in (WorkingAdapter(lora, config, model.dtype), None):  # None: the base, or a teacher
            trunk = Trunk(config, model.weights, model.rotation, documents, adapter, linears=linears)
            for recompute in _RECOMPUTE if adapter else (None,):
                step = EagerStep(trunk, tokens, recompute, lambda: None)
                hidden = step.forward()
                if recompute is not None:
                    step.backward(hidden)
    # Losses do not depend on the base.
    for rows in (1, 7, 48):
        for gradient in (True, False):
            hidden = torch.empty(rows, config.hidden_size, dtype=model.dtype, requires_grad=gradient)
            with torch.set_grad_enabled(gradient):
                token_scores(hidden, model.weights.embedding, torch.zeros(rows, dtype=torch.int64), 1.0)
                for beta in (0.0, 0.5, 1.0):
                    head = model.weights.embedding
                    divergence(hidden, head, hidden.detach(), head, beta=beta, temperature=1.0)


def _cut_up(start: Start, kernels: KernelConfigs) -> None:
    config, device = start.config, kernels.device
    cache = DeviceCache.allocate(
        config,
        torch.bfloat16,
        _CPU,
        num_blocks=1,
        block_size=16,
        num_slots=2,
        state_dtype=torch.bfloat16 if start.state_bfloat16 else torch.float32,
        waiting_writes=WAITING_WRITES,
    )
    segments = Segments.build([16 * TILE], [0], [1], [0], _CPU)
    rows, heads = 16 * TILE, config.linear_value_heads
    projected = torch.empty(rows, config.conv_dim + config.value_size + 2 * heads, dtype=torch.bfloat16)
    mixed = torch.empty(rows, config.conv_dim, dtype=torch.bfloat16)
    floats = [torch.empty(size) for size in (heads, heads, config.linear_value_dim)]
    for scan in (FEW, many(device)):
        gated_delta_prefill(
            mixed,
            projected,
            *floats,
            1e-6,
            cache.recurrent[0],
            segments,
            waiting=cache.waiting[0] if cache.waiting else None,
            config=replace(scan, pieces=pieces_of(4, device)),
            pdl=device.programmatic_launch,
        )


def _float8(matrix: Matrix, device: DeviceLimits) -> Float8Linear:
    """What Float8Linear.of() makes of a matrix, without its numbers."""
    (out, into), rest = matrix.shape, matrix.shape[0] % GROUP

    def weight(rows: int, width: int) -> Fp8Weight:
        return Fp8Weight(torch.empty(rows, width, dtype=torch.float8_e4m3fn), torch.empty(rows))

    last = torch.empty(rest, into, dtype=torch.bfloat16) if rest else None
    return Float8Linear(weight(out, into), weight(into, out - rest), last, device)


def _documents() -> Sequence[Documents]:
    """One document, several, and rows that 16 does not divide; a captured step's, with room for more; documents that go
    on from others, few and many at once."""
    lengths: Sequence[Sequence[int]] = ([1], [48], [7, 26], [16] * 8, [1024], [8192])
    trees = (Documents.branching([16, 8, 9], [None, 0, 0], _CPU, past=DENSE.conv_kernel - 1),
             Documents.branching([16] * 8, [None, *[0] * 7], _CPU, past=DENSE.conv_kernel - 1))  # fmt: skip
    return [*(Documents.build(each, _CPU) for each in lengths), Documents.build([512], _CPU, room=16), *trees]


def _decoded(weight: Fp8Weight | Int4Weight, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype)
