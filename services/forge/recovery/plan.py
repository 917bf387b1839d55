"""Plan of one recovery: what it reads, what it trains, and what it takes of memory and disk."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from services.adapter_tools.output import MARGIN_BYTES, bytes_below
from services.common.errors import InvalidRequest
from services.common.text.tokenizer import TextCodec
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.config import ModelConfig
from services.engine.models.interface import CausalLM, resolve_dtype
from services.engine.models.registry import read_config
from services.engine.models.weights.shards import Progress, silent
from services.forge.compaction import Base
from services.forge.record import history
from services.forge.recovery.examples import Examples
from services.forge.recovery.memory import MemoryPlan, plan_memory, state_bytes, trained_numbers
from services.forge.recovery.neighbours import LastCut
from services.forge.recovery.settings import RecoverySettings
from services.forge.recovery.student import LoraStudent, NeighbourStudent, Student
from services.trainer.memory.estimate import mib


@dataclass(frozen=True, slots=True)
class LoadedTeacher:
    """A checkpoint that somebody else has loaded, such as an engine, to distil from."""

    directory: Path
    digest: str
    model: CausalLM
    """In the dtype and on the device of the recovery."""


Teacher: TypeAlias = Path | LoadedTeacher
"""Directory of a checkpoint, or a loaded one."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """A recovery that is checked, before anything is loaded."""

    base: Base
    digest: str
    codec: TextCodec
    examples: Examples
    names: tuple[str, ...]
    """Tensors that are trained as a whole; none with LoRA."""
    trained: int
    """Numbers that are trained."""
    teacher: Teacher | None
    taught_by: Mapping[str, Any] | None
    """The teacher in records."""
    memory: MemoryPlan

    @classmethod
    def of(
        cls,
        directory: Path,
        settings: RecoverySettings,
        stack: ExitStack,
        *,
        data: Path,
        data_name: str | None = None,
        held_out: Path | None = None,
        teacher: Teacher | None = None,
        progress: Progress = silent,
    ) -> RecoveryPlan:
        """Plan of a checkpoint's recovery; arguments as of recover().

        Args:
            stack: closes the checkpoint's files.

        Raises:
            InvalidRequest, CheckpointRejected: what is wrong with which file or setting.
        """
        if settings.method == "distill" and teacher is None:
            raise InvalidRequest("distill learns from a teacher: name its checkpoint, or take sft", param="teacher")
        base = Base(directory, stack)
        codec = TextCodec.from_directory(directory)
        examples = Examples.read(data, held_out, codec, settings, name=data_name)
        progress("digest of the model", 0, 0)
        digest = checkpoint_digest(directory)
        records = history(directory, digest)
        names: tuple[str, ...] = ()
        if settings.trains == "neighbours":
            names = tuple(LastCut.of(records, directory).tensors(base.config))
        trained = trained_numbers(base.config, settings, names)
        taught_by = teacher_config = None
        if settings.method == "distill":
            taught_by, teacher_config = _described(teacher, codec, progress)
        device = torch.device(settings.device)
        memory = plan_memory(
            base.config,
            teacher_config,
            settings,
            [*examples.learnt, *examples.held_out],
            numbers=trained,
            dtype=resolve_dtype(settings.dtype, device),
            device=device,
            teacher_is_loaded=isinstance(teacher, LoadedTeacher),
        )
        teacher = teacher if settings.method == "distill" else None
        return cls(base, digest, codec, examples, names, trained, teacher, taught_by, memory)

    @property
    def output_bytes(self) -> int:
        """Bytes of the checkpoint that comes out."""
        return sum(len(data) for _, data in self.base.tensors.values())

    def check(self, settings: RecoverySettings, out: Path, state: Path, available: int) -> None:
        """Refuses what does not fit, before anything is loaded.

        Args:
            available: bytes of the device that it may take.

        Raises:
            DoesNotFit: the memory; InvalidRequest: the disk. Both have the numbers.
        """
        self.memory.check(available, torch.device(settings.device))
        states = state_bytes(self.trained, settings)
        left = max(0, states - bytes_below(state))  # of a run that was broken off
        needs = ((out.parent, self.output_bytes, "out"), (state, left, "state"))
        disks: dict[int, int] = {}
        for place, nbytes, field in needs:
            there = next(path for path in (place, *place.absolute().parents) if path.exists())
            disk = there.stat().st_dev
            disks[disk] = disks.get(disk, MARGIN_BYTES) + nbytes
            free = shutil.disk_usage(there).free
            if disks[disk] > free:
                raise InvalidRequest(
                    f"the recovery writes {mib(self.output_bytes)} to {out} and states of up to "
                    f"{mib(states)} below {state}, and the disk of {there} has {mib(free)} free: "
                    "make room, or name another directory",
                    param=field,
                )

    def summary(self, settings: RecoverySettings, available: int) -> dict[str, Any]:
        """Plan as JSON.

        Args:
            available: bytes of the device that it may take.
        """
        parameters = sum(math.prod(header["shape"]) for header, _ in self.base.tensors.values())
        sizes = {"parameters": parameters, "parameters_after": parameters}
        return sizes | {
            "bytes": self.output_bytes,
            "bytes_after": self.output_bytes,
            "trained_parameters": self.trained,
            "examples": {"learnt": len(self.examples.learnt), "held_out": len(self.examples.held_out)},
            "steps": settings.steps,
            "tokens": settings.steps * settings.batch_tokens,
            "memory": self.memory.summary(),
            "memory_bytes": self.memory.total,
            "memory_there": available,
            "disk_bytes": self.output_bytes + state_bytes(self.trained, settings),
        }

    def recipe(self, settings: RecoverySettings) -> dict[str, Any]:
        """What the result depends on beside the checkpoint and the data."""
        return settings.record() | {"teacher": self.taught_by, "trained_tensors": len(self.names) or "lora"}

    def identity(self, settings: RecoverySettings) -> str:
        """Hex sha256 that a state belongs to."""
        content = [self.digest, self.recipe(settings), self.examples.files, self.names]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def student(self, settings: RecoverySettings, model: CausalLM) -> Student:
        """What is trained of the loaded model."""
        if settings.trains == "lora":
            return LoraStudent(self.base, model, settings.lora, recompute=settings.recompute)
        return NeighbourStudent(self.base, model, self.names, recompute=settings.recompute)


def _described(teacher: Teacher | None, codec: TextCodec, progress: Progress) -> tuple[dict[str, Any], ModelConfig]:
    """A teacher in records, and its config."""
    if teacher is None:
        raise ValueError("there is no teacher")
    directory = teacher.directory if isinstance(teacher, LoadedTeacher) else teacher
    if TextCodec.from_directory(directory).files["tokenizer.json"] != codec.files["tokenizer.json"]:
        raise InvalidRequest(
            f"{directory} has another tokenizer than the student: what it says of a token is of another text",
            param="teacher",
        )
    name = directory.resolve().name
    if isinstance(teacher, LoadedTeacher):
        return {"name": name, "digest": teacher.digest}, teacher.model.config
    progress("digest of the teacher", 0, 0)
    return {"name": name, "digest": checkpoint_digest(directory)}, read_config(directory)
