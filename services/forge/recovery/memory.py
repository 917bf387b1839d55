"""Memory of a recovery, planned before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.errors import DoesNotFit
from services.common.jobs.documents import Document
from services.common.telemetry.process import machine_bytes
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Formats, copies_head, weight_bytes
from services.engine.models.lora.trainable import LoraParams
from services.forge.recovery.sampling import cache_bytes
from services.forge.recovery.settings import RecoverySettings
from services.trainer.memory.estimate import TeacherWork, TrainingMemory, Workload, estimate, mib
from services.trainer.optimizer.adamw_8bit import STATE_BYTES
from services.trainer.packing import largest_microbatch

_MEMORY = Path("/proc/meminfo")
_MASTERS = 2 * 4
"""Bytes of a trained number in a state, beside its moments: as it is, and as it was at the lowest held-out loss."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device of one recovery."""

    student: int
    """Weights as they are loaded."""
    teacher: int
    """Its weights, if they are loaded for this recovery."""
    training: TrainingMemory
    sampling: int
    """Caches of completions that are sampled together, and the weights as they are then."""

    @property
    def total(self) -> int:
        """Bytes at once: nothing is sampled while gradients are computed."""
        working = self.training.total - self.training.adapter
        return self.student + self.teacher + self.training.adapter + max(working, self.sampling)

    def summary(self) -> dict[str, int]:
        """Plan as JSON: bytes of each part."""
        return {
            "student": self.student,
            "teacher": self.teacher,
            "masters_gradients_optimizer": self.training.adapter,
            "activations": self.training.activations,
            "logits": self.training.logits,
            "teacher_forward": self.training.teacher,
            "sampling": self.sampling,
        }

    def check(self, available: int, device: torch.device) -> None:
        """Refuses what does not fit. Raises DoesNotFit."""
        if self.total <= available:
            return
        training = self.training
        teacher = f"the teacher {mib(self.teacher)}, " if self.teacher else ""
        sampling = f", sampling {mib(self.sampling)}" if self.sampling else ""
        raise DoesNotFit(
            f"the recovery needs {mib(self.total)} (the student {mib(self.student)}, {teacher}masters, gradients and "
            f"optimizer {mib(training.adapter)}, activations {mib(training.activations)}, logits "
            f"{mib(training.logits)}, the teacher's forward {mib(training.teacher)}{sampling}), and {device} has "
            f"{mib(available)} for it: lower tokens_per_forward, set recompute to full or optimizer_states to 8bit, "
            "or train lora",
            param="tokens_per_forward",
        )


def moment_bytes(settings: RecoverySettings) -> int:
    """Bytes of AdamW's moments of one trained number."""
    return 8 if settings.optimizer_states == "float32" else int(STATE_BYTES) + 1


def state_bytes(numbers: int, settings: RecoverySettings) -> int:
    """Bytes on disk of states to resume from, at most: the last one stays until the next one is whole.

    Args:
        numbers: that are trained.
    """
    return 2 * numbers * (_MASTERS + moment_bytes(settings))


def trained_numbers(config: ModelConfig, settings: RecoverySettings, names: Sequence[str]) -> int:
    """Numbers that a recovery trains.

    Args:
        names: tensors that are trained as a whole; not looked at with LoRA.
    """
    if settings.trains == "lora":
        chosen = LoraParams.create(config, settings.lora, device="meta").targets
        return sum(target.a.numel() + target.b.numel() for target in chosen.values())
    shapes = config.tensor_shapes()
    return sum(math.prod(shapes[name]) for name in names)


def plan_memory(
    config: ModelConfig,
    teacher: ModelConfig | None,
    settings: RecoverySettings,
    documents: Sequence[Document],
    *,
    numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    teacher_is_loaded: bool,
) -> MemoryPlan:
    """Plan of a recovery.

    Args:
        teacher: of distillation.
        documents: all that are read.
        numbers: that are trained.
        teacher_is_loaded: by somebody else.
    """
    lengths = [document.length for document in documents]
    if settings.on_policy:
        lengths = [min(length, settings.max_document_tokens) + settings.max_new_tokens for length in lengths]
    lora, itemsize = settings.trains == "lora", dtype.itemsize
    # Masters and gradients; of whole tensors also copies as the model reads them, with a gradient of their own.
    held = 8 + moment_bytes(settings) + (0 if lora else 2 * itemsize)
    work = Workload(
        adapter_numbers=numbers,
        rank=settings.lora.rank if lora else 1,
        tokens=largest_microbatch(lengths, settings.tokens_per_forward),
        itemsize=itemsize,
        recompute=settings.recompute,
        fused=lora and device.type == "cuda",
        teacher=None if teacher is None else TeacherWork(teacher),
        number_bytes=held,
    )
    sampling = 0
    if settings.on_policy:
        longest = max(lengths)
        together = max(1, settings.tokens_per_forward // settings.max_new_tokens)
        # LoRA's matrices exist a second time, with the update added to them; a master is read as it is in float32.
        copies = _model_bytes(config, dtype, device) if lora or itemsize != 4 else numbers * itemsize
        sampling = cache_bytes(config, together, longest, itemsize) + copies
    return MemoryPlan(
        student=_model_bytes(config, dtype, device),
        teacher=0 if teacher is None or teacher_is_loaded else _model_bytes(teacher, dtype, device),
        training=estimate(config, work),
        sampling=sampling,
    )


def available_bytes(device: torch.device) -> int:
    """Bytes of a device that are free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        rows = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return min(machine_bytes(), int(rows["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):  # not Linux
        return machine_bytes()


def _model_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    return weight_bytes(config, Formats(dtype.itemsize, head_copy=copies_head(config, dtype, device)))
