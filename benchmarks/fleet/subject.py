"""What is simulated: a model on a card, with the engine's own plan of its memory and a cost model of its steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.fleet.cost import CostModel, read_steps
from benchmarks.serving.cards.plans import Planned, planned
from benchmarks.serving.cards.table import card
from services.engine.scheduler.config import SchedulerConfig
from services.pod.memory import state_slots

Name = Literal["27b-h100", "4b-h200"]
_RESULTS = Path(__file__).resolve().parents[1] / "results"
_CONTEXT = 40960
ADAPTER_LOAD_SECONDS = 0.027
"""From an adapter's files to its slot, beside 64 requests (benchmarks/README.md, swaps)."""
_STORE_LINK = 12.5e9
"""Bytes a second of the object store for all engines together: one line of 100 Gbit/s. Assumed."""
_ENGINE_LINK = 3.125e9
"""Bytes a second of an engine's own network: 25 Gbit/s. Assumed."""
EVENT_SECONDS = 0.005
"""From a publication to the engines that listen for it. Assumed."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Model on a card."""

    name: str
    config: SchedulerConfig
    cost: CostModel
    cost_error: float
    """Mean relative error of the cost model over what it was fitted to."""
    adapter_slots: int
    adapter_bytes: int
    start_seconds: float
    """From the start of an engine's process to its first step."""
    dollars_per_hour: float
    """Of one card. Assumed."""
    max_waiting: int = 256
    depth: int = 2
    """Steps that are planned ahead, as the CUDA runner has them."""
    store_link: float = _STORE_LINK
    engine_link: float = _ENGINE_LINK


@dataclass(frozen=True, slots=True)
class _Source:
    shape: str
    card: str
    quant: Literal["none", "fp8"]
    results: tuple[str, ...]
    dollars_per_hour: float


_SOURCES: dict[str, _Source] = {
    "27b-h100": _Source("qwen3.5-27b", "H100, 80 GB", "fp8", ("2026-11-28-h100-27b-fp8.jsonl",), 2.5),
    "4b-h200": _Source(
        "qwen3.5-4b",
        "H200, 141 GB",
        "none",
        ("2026-11-29-h200-serving-after.jsonl", "2026-11-22-h200-serving.jsonl"),
        3.5,
    ),
}


def subject(name: Name) -> Subject:
    """A subject by its name."""
    source = _SOURCES[name]
    made = planned(source.shape, card(source.card), source.quant)
    if made is None:
        raise ValueError(f"{source.shape} does not fit {source.card}")
    config = _config(made)
    files = [_RESULTS / file for file in source.results]
    steps = [step for file in files for step in read_steps(file, source.quant)]
    cost = CostModel.fit(steps)
    first = json.loads(files[0].read_text().splitlines()[0])
    if max(step.context / max(1, step.decodes) for step in steps) < 2048:
        cost = _with_attention(steps, config, first)
    slots = made.settings.adapter_slots
    return Subject(
        name,
        config,
        cost,
        cost.error(steps),
        slots,
        made.plan.adapters // (slots + 1),
        first["start_s"],
        source.dollars_per_hour,
    )


def _with_attention(steps: list[Any], config: SchedulerConfig, result: dict[str, Any]) -> CostModel:
    """Cost model of steps that were all measured with short contexts, which do not tell what attention costs: decodes
    read their KV at the bandwidth of a copy, and prompt tokens cost what the engine's own estimate says."""
    context = config.block_bytes / config.block_size / (result["bandwidth_tb_s"] * 1e12)
    without = CostModel.fit(steps, context, 0.0)
    return CostModel.fit(steps, context, config.attention_cost * without.token_seconds)


def _config(made: Planned) -> SchedulerConfig:
    """Configuration of the scheduler, as services.pod.parts.loaded makes it of a plan."""
    settings, memory, config = made.settings, made.plan, made.config
    return SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        token_budget=settings.token_budget,
        block_size=settings.block_size,
        num_blocks=memory.num_blocks,
        num_slots=state_slots(settings),
        max_model_len=min(_CONTEXT, memory.capacity_tokens),
        mixed_prefill_tokens=settings.mixed_prefill_tokens,
        block_bytes=memory.kv // memory.num_blocks,
        slot_bytes=memory.states // state_slots(settings),
        attention_cost=2 * config.cache_layout.kv_layers * config.query_size / config.parameters(),
    )


def without_cache(subject: Subject) -> Subject:
    """A subject whose engines cache nothing."""
    return replace(subject, config=replace(subject.config, prefix_cache=False))
