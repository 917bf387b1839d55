"""The least time of a decode step: reading once what it reads, at the memory's nominal bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.lib.cases import Case
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Formats, Quantization, block_bytes, matrix_bytes, slot_bytes
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig

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
        # Read and written back.
        "states": rows * 2 * slot_bytes(config, formats),
    }


def beside_floor(engine: InProcessEngine, case: Case, decode_rate: float, *, lora: int) -> dict[str, Any]:
    """Fields of a report on a case: bytes of a step, the least time that they take, and its share of the time taken.
    {} on a CPU.

    Args:
        decode_rate: tokens a second of all sequences.
        lora: adapters that requests use, each read once a step.
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
    bandwidth = limits_of(model.device).bandwidth
    floor = sum(parts.values()) / bandwidth
    taken = case.requests / decode_rate
    return {
        "step_us": round(1e6 * taken, 1),
        "floor_us": round(1e6 * floor, 1),
        "of_floor": round(floor / taken, 3),
        "floor_mb": {name: round(size / 1e6, 1) for name, size in parts.items() if size},
        "bandwidth_tb_s": round(bandwidth / 1e12, 3),
    }
