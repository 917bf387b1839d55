"""The least time of a decode step: moving once what it moves, at the bandwidth of a copy on the same card."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.cases import Case
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Formats, Quantization, block_bytes, matrix_bytes, slot_bytes
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.settings import EngineSettings

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Experts that so many tokens choose together, on average, where each chooses ``chosen`` alike likely ones."""
    return experts * (1.0 - (1.0 - chosen / experts) ** rows)


def step_bytes(config: ModelConfig, formats: Formats, rows: int, context: int) -> dict[str, float]:
    """Bytes of a step of ``rows`` decodes, by what they are of.

    Args:
        context: tokens of each sequence.
    """
    kind, itemsize = formats.storage.quantization, formats.itemsize
    matrices = experts = 0.0
    for layer in range(config.num_layers):
        matrices += sum(matrix_bytes(out, into, itemsize, kind) for out, into in config.linear_shapes(layer).values())
        if isinstance(config, Qwen3_5MoeConfig):
            read = distinct_experts(config.num_experts, config.experts_per_token, rows)
            experts += sum(
                read * matrix_bytes(out, into, itemsize, kind) for _, out, into in config.expert_shapes(layer).values()
            )
    head_kind: Quantization = "fp8" if formats.storage.float8_head else "none"
    return {
        "matrices": matrices,
        "experts": experts,
        "vectors": config.vector_bytes(itemsize),
        "head": matrix_bytes(config.vocab_size, config.hidden_size, itemsize, head_kind),
        "keys and values": rows * context * block_bytes(config, 1, formats),
        "states": rows * state_bytes(config, formats, rows),
    }


def state_bytes(config: ModelConfig, formats: Formats, rows: int) -> float:
    """Bytes that a token of one sequence reads and writes of its states, in a step of ``rows`` decodes.

    States are read and written back. From LATE_ROWS decodes on the recurrent ones are written back once in as many
    tokens as writes may wait, and what waits is read with them.
    """
    from kernels.gpu.delta.step import LATE_ROWS

    late = formats.waiting_writes
    alone = slot_bytes(config, replace(formats, waiting_writes=0))
    if not late or rows < LATE_ROWS:
        return 2 * alone
    layout = config.cache_layout
    conv = layout.state_layers * layout.conv_channels * (layout.conv_kernel - 1) * formats.itemsize
    waiting = (slot_bytes(config, formats) - alone) / late
    return 2 * conv + (alone - conv) * (1 + 1 / late) + waiting * (1 + (late - 1) / 2)


def measured_bandwidth(settings: EngineSettings) -> float:
    """Bytes a second of a copy on the device of the settings, measured now in 4 GiB; 0 on a CPU."""
    if settings.resolved_device(torch.cuda.is_available()) == "cpu":
        return 0.0
    from benchmarks.kernels.timing import copy_bandwidth

    measured = copy_bandwidth()
    torch.cuda.empty_cache()
    return measured


def beside_floor(
    engine: InProcessEngine, case: Case, decode_rate: float, *, lora: int, bandwidth: float
) -> dict[str, Any]:
    """Fields of a report on a case: bytes of a step, the least time that they take, and its share of the time taken.
    {} on a CPU.

    Args:
        decode_rate: tokens a second of all sequences.
        lora: adapters that requests use, each read once a step.
        bandwidth: measured bytes a second.
    """
    from kernels.gpu.launch.device import limits_of
    from services.pod.device import Device
    from services.pod.memory import formats

    model = engine.engine.model
    if model.device.type != "cuda":
        return {}
    device = Device.of(engine.settings)
    settings = engine.settings.for_device(device.kind)
    stored = formats(model.config, settings, model.dtype, device)
    parts = step_bytes(model.config, stored, case.requests, case.prompt_tokens + case.new_tokens // 2)
    parts["adapters"] = min(lora, case.requests) * LoraSlots.bytes_per_slot(
        model.config, settings.max_lora_rank, model.dtype
    )
    floor = sum(parts.values()) / bandwidth
    taken = case.requests / decode_rate
    return {
        "step_us": round(1e6 * taken, 1),
        "floor_us": round(1e6 * floor, 1),
        "of_floor": round(floor / taken, 3),
        "floor_mb": {name: round(size / 1e6, 1) for name, size in parts.items() if size},
        "bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "nominal_tb_s": round(limits_of(model.device).bandwidth / 1e12, 3),
    }
