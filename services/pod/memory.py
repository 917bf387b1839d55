"""Memory plan of a pod: the model's needs and the device's memory, computed before anything is loaded."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Literal

import torch

from services.common.errors import DoesNotFit, InvalidRequest
from services.common.telemetry.process import machine_bytes
from services.engine.kv_cache.memory_plan import Footprint, MemoryPlan, format_bytes, plan_memory
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import (
    Formats,
    Quantization,
    Storage,
    block_bytes,
    copies_head,
    float8_prompt_bytes,
    float8_training_bytes,
    slot_bytes,
    weight_bytes,
    widest_output,
)
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import target_shapes
from services.engine.scheduler.step_plan import most_sampled_rows
from services.engine.settings import ADAPTER_SLOTS, EngineSettings
from services.pod.device import Device, with_quantization
from services.pod.fit_advice import fit_advice
from services.trainer.jobs.adapter_run import USUAL_TOKENS
from services.trainer.memory.estimate import Workload, estimate

_LOGIT_COPIES = 4
"""Number of float32 [rows, vocabulary] tensors that sampling has at once."""
_ACTIVATION_COPIES = 8
"""Number of tensors as wide as the widest layer that a step has at once."""
_GRAPH_COPIES = 4
"""The same number in the memory that all CUDA graphs share and no other step may use."""
_GRAPH_FIXED = 512 * 2**20
"""Bytes of some hundred captured graphs, the logits that those of few rows keep, kernels, and the workspaces of matrix
products."""
_CAPTURED_PREFILL = 2048
"""Tokens of the longest prefill that is captured, alone or beside decodes."""
_CAPTURED_APART = 3840
"""The same beside decodes that are computed apart from it."""
_SPLITS = 8
"""Parts of a context in decode attention with a large batch."""
_SAMPLER_ROW = 64 * 2**10
"""Bytes of the histograms and partial results of a sampled row."""
_USUAL_RANK = 16
"""Rank of a modest job, with its adapter on all linear layers."""
_LEAST_TOKENS = 1024
"""Tokens of a microbatch of the smallest job that fewer sequences make room for."""
WAITING_WRITES = 8
"""Late writes of a recurrent state: a step of many decodes moves 76 KB a head instead of 128; 4 would move 83, 16
75."""
_SNAPSHOTS_ON_CPU = 64
_SNAPSHOT_SHARE = 0.15
_LEAST_SNAPSHOTS, _MOST_SNAPSHOTS = 8, 1024
_STAGING = 64 * 2**20
"""Bytes of the staging buffer for copies between caches and host memory."""
_CONTEXT = 512 * 2**20
"""Bytes that CUDA's context and loaded kernels take on the device, outside any allocator."""
_STEP_TOKENS = (8192, 4096, 2048)
"""Tokens of the largest step to try, where the settings leave them open."""
_STEP_SHARE = 0.05
"""Most of the device that the activations of that step may take: a small card is filled by fewer tokens, too."""
_LEAST_ADAPTERS, _ADAPTER_SHARE = 4, 0.03
"""Fewest adapter slots where the settings leave their number open, and most of the device that more may take."""
_SEQUENCES = (192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of sequences to try where memory is short."""


def device_bytes(device: Device, limit: int = 0) -> int:
    """Bytes that this process may use, before it loads anything.

    On CUDA: what is free on the card now, or what device_memory leaves beside CUDA's context; on CPU: the machine's
    memory or the container's limit, the lower one.

    Args:
        limit: device_memory of the settings; 0: none.

    Raises:
        DoesNotFit: less is free than the limit promises.
    """
    if device.kind == "cpu":
        return machine_bytes()
    free, total = torch.cuda.mem_get_info(device.torch)
    if not limit:
        return int(free)
    if limit <= _CONTEXT or limit - _CONTEXT > free:
        raise DoesNotFit(
            f"TEMPER_DEVICE_MEMORY={format_bytes(limit)} must be more than the {format_bytes(_CONTEXT)} of CUDA's "
            f"context and at most the {format_bytes(free + _CONTEXT)} that are free, of {format_bytes(total)}",
            param="device_memory",
        )
    return limit - _CONTEXT


def limit_allocations(device: Device, settings: EngineSettings) -> None:
    """Holds this process to device_memory: an allocation beyond it fails, whatever is free on the card. Graphs and
    loaded kernels are no allocations: their part of the plan is left out."""
    if device.kind == "cuda" and settings.device_memory:
        _, total = torch.cuda.mem_get_info(device.torch)
        allowed = device_bytes(device, int(settings.device_memory)) - _GRAPH_FIXED
        torch.cuda.set_per_process_memory_fraction(allowed / total, 0)


def storage(settings: EngineSettings, device: Device) -> Storage:
    """Storage of this pod's weight matrices. A quantized model's head is fp8 wherever the GPU has it: it is the largest
    matrix of a step, and an int4 model's rounding matters least there.

    Args:
        settings: with_quantization().
    """
    kind = _filled_in(settings.quantization)
    return Storage(
        kind,
        float8_head=kind != "none" and device.has_float8,
        invariant=settings.batch_invariant,
        int4_draft_head=settings.speculative != "none" and device.kind == "cuda",
        prompts=settings.prompt_products,
    )


def teacher_storage(settings: EngineSettings, device: Device) -> Storage:
    """Storage of the second model's weight matrices.

    Args:
        settings: with_quantization().
    """
    kind = _filled_in(settings.teacher_quantization)
    return Storage(kind, float8_head=kind != "none" and device.has_float8)


def _filled_in(quantization: Literal["auto", "none", "fp8", "int4"]) -> Quantization:
    if quantization == "auto":
        raise ValueError("a quantization of auto is filled in by with_quantization()")
    return quantization


def formats(config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: Device) -> Formats:
    """Number formats of this pod."""
    return Formats(
        itemsize=dtype.itemsize,
        storage=storage(settings, device),
        head_copy=copies_head(config, dtype, device.torch),
        mtp=settings.speculative == "mtp",
        form=settings.drafter_form,
        kv_float8=settings.kv_cache_dtype == "fp8",
        state_itemsize=2 if settings.state_dtype == "bfloat16" else 4,
        waiting_writes=waiting_writes(device.kind),
    )


def _teacher_bytes(teacher: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: Device) -> int:
    """Bytes of the second model: its weights, and one decoded matrix if they are quantized."""
    stored = Formats(
        itemsize=dtype.itemsize,
        storage=teacher_storage(settings, device),
        head_copy=copies_head(teacher, dtype, device.torch),
    )
    decoded = 0
    if settings.teacher_quantization != "none":
        decoded = teacher.hidden_size * max(widest_output(teacher), teacher.vocab_size) * dtype.itemsize
    return weight_bytes(teacher, stored) + decoded


def footprint(
    config: ModelConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
    teacher: ModelConfig | None = None,
) -> Footprint:
    """Footprint of the model, and of a second one that jobs distil from; the settings are those of the device
    (for_device)."""
    taught = 0 if teacher is None else _teacher_bytes(teacher, settings, dtype, device)
    stored = formats(config, settings, dtype, device)
    logits = 4 * config.vocab_size
    sampled = _sampled_rows(settings)
    weights, block = weight_bytes(config, stored), block_bytes(config, settings.block_size, stored)
    copies = float8_prompt_bytes(config, stored)
    if settings.trains_in_float8:
        copies += float8_training_bytes(config, stored)
    slot = slot_bytes(config, stored)
    adapter_slot = LoraSlots.bytes_per_slot(config, settings.max_lora_rank, dtype)
    if device.kind == "cpu":
        widest = max(out for layer in range(config.num_layers) for out, _ in config.linear_shapes(layer).values())
        activations = 4 * _ACTIVATION_COPIES * settings.token_budget * widest
        workspace = _LOGIT_COPIES * sampled * logits + activations
        if copies:  # one of them in float32, to be multiplied with
            workspace += 4 * config.hidden_size * widest_output(config)
        return Footprint(weights, block, slot, adapter_slot, workspace, teacher=taught, copies=copies)
    row = widest_output(config) * dtype.itemsize
    rows, slots = settings.max_num_seqs, state_slots(settings)
    context = settings.max_model_len or config.max_position_embeddings
    decoded = 0
    if settings.quantization != "none":  # for a long prefill or for training, one at a time
        decoded = config.hidden_size * max(widest_output(config), config.vocab_size) * dtype.itemsize
    partial = sampled * config.num_heads * _SPLITS * (config.head_dim + 2) * 4
    tables = slots * -(-context // settings.block_size) * 4
    activations = _ACTIVATION_COPIES * settings.token_budget * row
    uploads = LoraSlots.upload_bytes(config, settings.max_lora_rank)
    verified = 0
    if settings.speculative != "none":  # inputs of the convolutions; steps are filled up to less than twice their size
        layout = config.cache_layout
        verified = (
            most_sampled_rows(2 * rows, settings.draft_tokens)
            * layout.state_layers
            * layout.conv_channels
            * dtype.itemsize
        )
    captured = min(settings.cuda_graphs, rows)
    return Footprint(
        weights=weights,
        block=block,
        slot=slot,
        adapter_slot=adapter_slot,
        workspace=sampled * logits * _LOGIT_COPIES
        + activations
        + decoded
        + partial
        + tables
        + uploads
        + verified
        + (_STAGING if settings.tiers and settings.prefix_cache else 0),
        # Counts of tokens for the penalties and biases of every row, both as wide as the vocabulary; a mask's bits.
        sampler=sampled * (2 * logits + _SAMPLER_ROW + config.vocab_size // 8),
        graphs=_graph_bytes(config, settings, captured, row) if captured else 0,
        teacher=taught,
        copies=copies,
    )


def _graph_bytes(config: ModelConfig, settings: EngineSettings, captured: int, row: int) -> int:
    """Bytes that graphs keep: the tensors of the largest captured step, and a decoded matrix if its prefill needs
    one."""
    prefill = min(_CAPTURED_PREFILL, settings.token_budget)
    beside = _CAPTURED_PREFILL if settings.prefill_float8 == "none" else _CAPTURED_APART
    rows = max(captured + min(settings.mixed_prefill_tokens, beside), prefill)
    if settings.speculative != "none":
        # Outputs of two graphs a shape, which nothing shares: of checking and of drawing.
        rows = 2 * max(rows, most_sampled_rows(captured, settings.draft_tokens))
    decoded = config.hidden_size * row if settings.quantization == "int4" else 0
    return _GRAPH_FIXED + rows * _GRAPH_COPIES * row + decoded


def snapshots(settings: EngineSettings, footprint: Footprint, budget: int, kind: str) -> int:
    """Default number of state slots for the prefix cache: on a GPU a share of what everything else leaves, each as
    large as the KV of some hundred tokens."""
    if kind == "cpu":
        return _SNAPSHOTS_ON_CPU
    left = (
        budget
        - footprint.fixed
        - settings.max_num_seqs * footprint.slot
        - settings.adapter_slots * footprint.adapter_slot
    )
    return min(_MOST_SNAPSHOTS, max(_LEAST_SNAPSHOTS, int(left * _SNAPSHOT_SHARE) // footprint.slot))


def state_slots(settings: EngineSettings) -> int:
    """Number of state slots to allocate: scratch, one a sequence, and the prefix cache's snapshots."""
    return 1 + settings.max_num_seqs + (settings.state_snapshots if settings.prefix_cache else 0)


def waiting_writes(kind: str) -> int:
    """Most writes that a recurrent state on a GPU is late."""
    return WAITING_WRITES if kind == "cuda" else 0


def _sampled_rows(settings: EngineSettings) -> int:
    """Most sampled rows of a step."""
    if settings.speculative == "none":
        return settings.max_num_seqs
    return most_sampled_rows(settings.max_num_seqs, settings.draft_tokens)


def plan(
    config: ModelConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
    available: int,
    teacher: ModelConfig | None = None,
) -> tuple[EngineSettings, MemoryPlan]:
    """Plans the memory of the device.

    Args:
        settings: settings as read. A max_num_seqs of 0 becomes the highest number, up to the device's default, that
            leaves KV and training half of what weights, workspace, adapters and snapshots do not take, and training
            what the smallest job needs. A token_budget and adapter_slots of 0 become what the device's size allows.
        available: device_bytes().
        teacher: config of the second model, if there is one.

    Returns:
        The settings with every 0 and "auto" quantization filled in, and the plan.

    Raises:
        DoesNotFit: the settings ask for more than there is; the message has the numbers and what to change.
        InvalidRequest: prompts would be computed in float8 from more rows on than a step has.
    """
    settings = with_quantization(settings, device, config, teacher)
    settings = _by_size(config, settings, dtype, device, available)
    try:
        chosen, made = _fitted(config, settings, dtype, device, available, teacher)
    except DoesNotFit as error:
        raise DoesNotFit(f"{error.message}\n{_fit_advice(config, settings, dtype, device, available)}") from error
    if chosen.prefill_float8 != "none" and chosen.prefill_float8_rows > chosen.token_budget:
        raise InvalidRequest(
            f"TEMPER_PREFILL_FLOAT8_ROWS={chosen.prefill_float8_rows} is above the {chosen.token_budget} tokens of a "
            "step, so that no prompt would be computed in float8: lower it, or raise TEMPER_TOKEN_BUDGET",
            param="prefill_float8_rows",
        )
    return chosen, made


def _fitted(
    config: ModelConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
    available: int,
    teacher: ModelConfig | None,
) -> tuple[EngineSettings, MemoryPlan]:
    if settings.max_num_seqs or device.kind == "cpu":
        chosen = _with_snapshots(config, settings.for_device(device.kind), dtype, device, available, teacher)
        return chosen, _plan(config, chosen, dtype, device, available, teacher)
    most = settings.for_device(device.kind).max_num_seqs
    for count in [count for count in _SEQUENCES if count < most]:
        chosen = settings.model_copy(update={"max_num_seqs": most}).for_device(device.kind)
        chosen = _with_snapshots(config, chosen, dtype, device, available, teacher)
        try:
            made = _plan(config, chosen, dtype, device, available, teacher)
        except DoesNotFit:
            most = count
            continue
        running = chosen.max_num_seqs * made.states // state_slots(chosen)
        roomy = 2 * running <= made.unclaimed - (made.states - running)
        if roomy and (_training_bytes(settings) is not None or made.training >= _job(config, dtype, _LEAST_TOKENS)):
            return chosen, made
        most = count
    chosen = settings.model_copy(update={"max_num_seqs": most}).for_device(device.kind)
    chosen = _with_snapshots(config, chosen, dtype, device, available, teacher)
    return chosen, _plan(config, chosen, dtype, device, available, teacher)


def _by_size(
    config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: Device, available: int
) -> EngineSettings:
    """Settings with what depends on a GPU's size filled in: a token_budget of 0 becomes as many tokens as a share of
    its memory holds the activations of, and every sequence's own; adapter_slots of 0 as many as a share of it holds."""
    if device.kind == "cpu":
        return settings
    budget, slots = settings.token_budget, settings.adapter_slots
    if not budget:
        token = _ACTIVATION_COPIES * widest_output(config) * dtype.itemsize
        most = int(_STEP_SHARE * available) // token
        budget = next((tokens for tokens in _STEP_TOKENS if tokens <= most), _STEP_TOKENS[-1])
        budget = max(budget, settings.max_num_seqs)
    if not slots:
        slot = LoraSlots.bytes_per_slot(config, settings.max_lora_rank, dtype)
        slots = min(ADAPTER_SLOTS, max(_LEAST_ADAPTERS, int(_ADAPTER_SHARE * available) // slot))
    return settings.model_copy(update={"token_budget": budget, "adapter_slots": slots})


def _with_snapshots(
    config: ModelConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
    available: int,
    teacher: ModelConfig | None,
) -> EngineSettings:
    """Settings with a state_snapshots of 0 filled in."""
    if settings.state_snapshots or not settings.prefix_cache:
        return settings
    needs = footprint(config, settings, dtype, device, teacher)
    count = snapshots(settings, needs, int(available * settings.memory_fraction), device.kind)
    return settings.model_copy(update={"state_snapshots": count})


def _fit_advice(
    config: ModelConfig, settings: EngineSettings, dtype: torch.dtype, device: Device, available: int
) -> str:
    chosen = settings.model_copy(update={"max_num_seqs": settings.max_num_seqs or _SEQUENCES[-1]})
    chosen = chosen.for_device(device.kind)
    smaller: dict[str, int] = {}
    if device.kind == "cuda" and settings.quantization == "none":
        for name in ("fp8", "int4") if device.has_float8 else ("int4",):
            with contextlib.suppress(InvalidRequest):  # shapes that cannot be quantized like this
                quantized = chosen.model_copy(update={"quantization": name})
                smaller[name] = footprint(config, quantized, dtype, device).weights
    return fit_advice(
        chosen,
        footprint(config, chosen, dtype, device),
        available=available,
        cuda=device.kind == "cuda",
        weights_by_quantization=smaller,
    )


def _plan(
    config: ModelConfig,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
    available: int,
    teacher: ModelConfig | None,
) -> MemoryPlan:
    context = settings.max_model_len or config.max_position_embeddings
    return plan_memory(
        int(available * settings.memory_fraction),
        footprint(config, settings, dtype, device, teacher),
        block_size=settings.block_size,
        num_slots=state_slots(settings),
        adapter_slots=settings.adapter_slots + 1,
        num_blocks=settings.num_blocks,
        kv_bytes=settings.kv_bytes_on_cpu if device.kind == "cpu" else int(settings.kv_cache_bytes),
        training_bytes=_training_bytes(settings),
        training_floor=_job(config, dtype, USUAL_TOKENS) if device.kind == "cuda" else 0,
        useful_blocks=1 + settings.max_num_seqs * -(-context // settings.block_size),
    )


def _training_bytes(settings: EngineSettings) -> int | None:
    """Memory of training that the settings ask for; None: the plan decides."""
    if not settings.trainer:
        return 0
    return int(settings.train_memory_bytes) or None


@lru_cache
def _job(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of a modest job with microbatches of so many tokens. Without this minimum a device with hardly room for the
    model would serve, and refuse every job."""
    numbers = sum(_USUAL_RANK * (out + into) for out, into in target_shapes(config).values())
    work = Workload(numbers, _USUAL_RANK, tokens, dtype.itemsize, "full", fused=True)
    return estimate(config, work).total
