"""Memory plans of cards that are not there: the engine's own (services.pod.memory), nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.lib.checkpoints.family import SHAPES
from benchmarks.serving.cards.table import Card
from services.common.errors import DoesNotFit
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.models.footprint import Formats, Quantization
from services.engine.models.lora.targets import target_shapes
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.settings import EngineSettings
from services.pod.memory import formats, plan
from services.trainer.memory.estimate import Workload, estimate

DTYPE = torch.bfloat16
_RANK = 16
_LONGEST = 262144
_USEFUL_SEQUENCES, _USEFUL_TOKENS = 4, 16384
"""Least of a plan that is worth naming: a few requests, and one of them long."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of a model on a card."""

    stored: Quantization
    config: Qwen3_5Config
    settings: EngineSettings
    """Settings with every 0 filled in."""
    plan: MemoryPlan
    formats: Formats

    @property
    def sequences(self) -> int:
        """Requests that run at once."""
        return self.settings.max_num_seqs

    @property
    def context(self) -> int:
        """Tokens of all requests together that the KV holds."""
        return self.plan.capacity_tokens

    def longest_document(self) -> int:
        """Tokens of the longest microbatch that training's part holds, of an adapter of rank 16 on all linear layers
        with full recomputing; found by halving."""
        numbers = sum(_RANK * (out + into) for out, into in target_shapes(self.config).values())
        low, high = 0, _LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            work = Workload(numbers, _RANK, middle, DTYPE.itemsize, "full", fused=True)
            low, high = (middle, high) if estimate(self.config, work).total <= self.plan.training else (low, middle - 1)
        return low


def quantizations(card: Card) -> tuple[Quantization, ...]:
    """Ways to store the weights that a card can, the one that rounds least first."""
    return ("none", "fp8", "int4") if card.device.has_float8 else ("none", "int4")


@cache
def config_of(shape: str) -> Qwen3_5Config:
    """Config of a published shape of the family."""
    kind = Qwen3_5MoeConfig if "num_experts" in SHAPES[shape] else Qwen3_5Config
    return kind.from_dict(SHAPES[shape])


@cache
def planned(shape: str, card: Card, stored: Quantization) -> Planned | None:
    """Plan with default settings; None: it does not fit.

    Args:
        shape: name of a published shape (benchmarks.lib.checkpoints.family).
    """
    config = config_of(shape)
    settings = _defaults().model_copy(update={"quantization": stored})
    try:
        # One sequence is the last that is tried: what cannot have it is told at once.
        plan(config, settings.model_copy(update={"max_num_seqs": 1}), DTYPE, card.device, card.free_bytes)
        chosen, made = plan(config, settings, DTYPE, card.device, card.free_bytes)
    except DoesNotFit:
        return None
    return Planned(stored, config, chosen, made, formats(config, chosen, DTYPE, card.device))


@cache
def _defaults() -> EngineSettings:
    """Default settings of an engine on a GPU."""
    return EngineSettings(device="cuda")


def lightest(shape: str, card: Card) -> Planned | None:
    """Plan that rounds the weights least and holds a few requests and one long one; None: no way to store them does."""
    for stored in quantizations(card):
        made = planned(shape, card, stored)
        if made is not None and made.sequences >= _USEFUL_SEQUENCES and made.context >= _USEFUL_TOKENS:
            return made
    return None
