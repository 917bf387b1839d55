"""Advice for a model that does not fit the device: variables and chart values to change, with the bytes of each."""

from __future__ import annotations

from services.engine.kv_cache.memory_plan import Footprint, format_bytes
from services.engine.settings import EngineSettings


def fit_advice(
    settings: EngineSettings,
    footprint: Footprint,
    *,
    available: int,
    cuda: bool,
    weights_by_quantization: dict[str, int],
) -> str:
    """Advice in several lines for whoever sets up the engine.

    Args:
        settings: settings that did not fit, every 0 filled in.
        available: free bytes of the device, of which memory_fraction may be used.
        weights_by_quantization: bytes of the weights for each quantization that this device can run.
    """
    smaller = [
        f"TEMPER_QUANTIZATION={name} (weights {format_bytes(size)} instead of {format_bytes(footprint.weights)})"
        for name, size in weights_by_quantization.items()
        if size < footprint.weights
    ]
    kv = f"now {format_bytes(int(settings.kv_cache_bytes))}" if settings.kv_cache_bytes else "now what is left"
    training = (
        f"now {format_bytes(int(settings.train_memory_bytes))}"
        if settings.train_memory_bytes
        else "now a quarter of what is left"
    )
    sequences = [
        f"TEMPER_MAX_NUM_SEQS (now {settings.max_num_seqs}, a sequence's state takes {format_bytes(footprint.slot)})"
    ]
    copies = {
        "TEMPER_PREFILL_FLOAT8=none": settings.prefill_float8 != "none",
        "TEMPER_TRAIN_FLOAT8=false": settings.trains_in_float8,
    }
    fewer = " or ".join(way for way, helps in copies.items() if helps)
    lines = [
        *smaller,
        *([f"{fewer} (float8 copies of weights take {format_bytes(footprint.copies)})"] if fewer else []),
        *(sequences if settings.max_num_seqs > 1 else []),
        f"TEMPER_STATE_SNAPSHOTS (now {settings.state_snapshots}, {format_bytes(footprint.slot)} each)",
        f"TEMPER_ADAPTER_SLOTS (now {settings.adapter_slots}, {format_bytes(footprint.adapter_slot)} each) or "
        f"TEMPER_MAX_LORA_RANK (now {settings.max_lora_rank})",
        f"TEMPER_TOKEN_BUDGET (now {settings.token_budget}, of the workspace of {format_bytes(footprint.workspace)})",
        f"TEMPER_KV_CACHE_BYTES ({kv}; a block takes {format_bytes(footprint.block)})",
        f"TEMPER_TRAIN_MEMORY_BYTES ({training})",
        f"TEMPER_MEMORY_FRACTION (now {settings.memory_fraction:g} of the {format_bytes(available)} that are free)",
    ]
    larger = "a GPU with more memory or a larger MIG slice" if cuda else "more memory for the container"
    return (
        "what to change, in the chart under engine.env:\n"
        + "\n".join(f"  {line}" for line in lines)
        + f"\n  or {larger}: engine.resources in the chart"
    )
