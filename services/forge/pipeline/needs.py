"""Needs of stages: memory and time, estimated from the model's config before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from services.common.jobs.documents import Document
from services.common.jobs.kinds.forge import NEED_DATA, ForgeImportance
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Formats, copies_head, weight_bytes
from services.engine.models.interface import resolve_dtype
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.weights.shards import Progress, silent
from services.forge.recovery.memory import plan_memory, state_bytes, trained_numbers
from services.forge.recovery.neighbours import LastCut
from services.forge.recovery.settings import RecoverySettings
from services.forge.units import WIDTHS, Kind, Width, count, places
from services.trainer.memory.estimate import Workload, estimate

STREAM_BYTES = 96 * 2**20
"""Bytes in memory while a checkpoint is read and written tensor by tensor."""
_DISK_RATE = 200e6
"""Bytes a second that a checkpoint is read, cut, digested and written, nominally."""
_SHARE = {"cpu": 0.25, "cuda": 0.35}
"""Share of the rate of a large matrix product that a whole forward reaches, nominally."""
_DECODE_SHARE = {"cpu": 0.15, "cuda": 0.02}
"""The same share while answers are sampled."""
_ITEM_TOKENS = 128
"""Tokens of an item with its answer, nominally."""
_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a device."""

    device: str
    flops: float
    """Floating-point operations a second of a large matrix product."""

    @classmethod
    def measured(cls, device: str, progress: Progress = silent) -> Rates:
        """Rates of this machine, measured in some tenths of a second."""
        progress("measuring the device", 0, 0)
        dtype = resolve_dtype("auto", device)
        left = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            float((left @ left)[0, 0])  # waits for the device
            best = min(best, time.perf_counter() - began)
        return cls(device, 2 * _SIZE**3 / best)

    def forward(self, config: ModelConfig, tokens: float) -> float:
        """Seconds to read so many tokens."""
        return 2 * config.parameters() * tokens / (self.flops * _SHARE[self.device])

    def answers(self, config: ModelConfig, items: int) -> float:
        """Seconds to answer so many items."""
        return 2 * config.parameters() * items * _ITEM_TOKENS / (self.flops * _DECODE_SHARE[self.device])

    @staticmethod
    def copied(nbytes: int) -> float:
        """Seconds to write a checkpoint that is made of another."""
        return nbytes / _DISK_RATE


def model_bytes(config: ModelConfig, device: str) -> int:
    """Bytes of the loaded weights."""
    dtype = resolve_dtype("auto", device)
    head = copies_head(config, dtype, torch.device(device))
    return weight_bytes(config, Formats(itemsize=dtype.itemsize, head_copy=head))


def importance_bytes(
    config: ModelConfig, settings: ForgeImportance, device: str, *, model_is_loaded: bool = False
) -> int:
    """Bytes of a measurement: weights and, at their peak, activations.

    Args:
        model_is_loaded: by somebody else.
    """
    if settings.method not in NEED_DATA:
        return STREAM_BYTES
    gradients = settings.method == "gradients"
    work = Workload(
        adapter_numbers=1,
        rank=1,
        # A whole sample is one forward, however long.
        tokens=max(settings.tokens_per_forward, settings.sample_tokens if settings.method == "leave_one_out" else 0),
        itemsize=resolve_dtype("auto", device).itemsize,
        recompute="none" if gradients else "full",
        fused=device == "cuda" and not gradients,
    )
    return (0 if model_is_loaded else model_bytes(config, device)) + estimate(config, work).total


def importance_seconds(
    config: Qwen3_5Config, settings: ForgeImportance, kinds: Collection[Kind], tokens: int, rates: Rates
) -> float:
    """Seconds of a measurement on so many tokens, but for reading the weights.

    Args:
        kinds: of units that get scores.
    """
    if settings.method not in NEED_DATA:
        return 0.0
    if settings.method == "leave_one_out":
        units = sum(count(config, width) * len(places(config, width, mtp=False)) for width in WIDTHS if width in kinds)
        units += config.num_layers if "layers" in kinds else 0
        return rates.forward(config, units * min(tokens, settings.sample_tokens))
    return rates.forward(config, tokens * (3 if settings.method == "gradients" else 1))


@dataclass(frozen=True, slots=True)
class RecoveryNeed:
    """What a recovery takes."""

    memory_bytes: int
    """Of the device, by its own plan."""
    state_bytes: int
    """Of the disk, beside the checkpoint that it makes."""
    bound: bool
    """Both are upper bounds: layers have gone, and which ones decides what is trained."""


def recovery_need(
    config: Qwen3_5Config,
    teacher: ModelConfig,
    settings: RecoverySettings,
    documents: Sequence[Document],
    gone: Collection[Kind],
    *,
    teacher_is_loaded: bool,
) -> RecoveryNeed:
    """What a recovery takes, before the cut is chosen.

    Args:
        config: of the model after the cut.
        documents: that are learnt from or held out.
        gone: kinds of units that the cut takes.
        teacher_is_loaded: by somebody else.
    """
    bound = "layers" in gone and settings.trains == "neighbours"
    widths: tuple[Width, ...] = tuple(width for width in WIDTHS if width in gone)
    names = LastCut(widths, tuple(range(config.num_layers)) if bound else ()).tensors(config)
    device = torch.device(settings.device)
    numbers = trained_numbers(config, settings, names)
    plan = plan_memory(
        config,
        teacher if settings.method == "distill" else None,
        settings,
        documents,
        numbers=numbers,
        dtype=resolve_dtype(settings.dtype, device),
        device=device,
        teacher_is_loaded=teacher_is_loaded,
    )
    return RecoveryNeed(plan.total, state_bytes(numbers, settings), bound)


def rounded(seconds: float) -> float:
    """Estimated seconds with the two digits that an estimate has: of a small model not 0."""
    return float(f"{seconds:.2g}")


def recovery_seconds(
    config: ModelConfig, teacher: ModelConfig | None, settings: RecoverySettings, rates: Rates
) -> float:
    """Seconds of all steps of one cycle.

    Args:
        teacher: not looked at unless it is distilled from.
    """
    tokens = settings.steps * settings.batch_tokens
    taught = rates.forward(teacher, tokens) if settings.method == "distill" and teacher is not None else 0.0
    return 3 * rates.forward(config, tokens) + taught
