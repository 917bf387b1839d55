"""Plan of a run, before anything is computed: what each stage makes, and what it takes of memory, disk and time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.adapter_tools.output import MARGIN_BYTES, bytes_below
from services.common.errors import DoesNotFit, InvalidRequest
from services.common.jobs.documents import Document
from services.common.text.tokenizer import TextCodec
from services.engine.models.config import Float8Scales
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import parse_config
from services.forge.compaction import Base, Plan, compacted, plan
from services.forge.cut import cut_config
from services.forge.importance.calibration import Calibration
from services.forge.pipeline.needs import (
    STREAM_BYTES,
    Rates,
    importance_bytes,
    importance_seconds,
    recovery_need,
    recovery_seconds,
    rounded,
)
from services.forge.pipeline.run import Pipeline, recovery_settings
from services.forge.pipeline.schedule import nominal_cut
from services.forge.quantization import BLOCK, quantized_bytes
from services.forge.recovery.examples import Examples
from services.forge.units import Kind, count
from services.trainer.memory.estimate import mib


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage before it runs."""

    name: str
    memory_bytes: int
    """Of the device, at its peak."""
    seconds: float
    disk_bytes: int = 0
    """Of the work directory, for what it makes."""
    state_bytes: int = 0
    """Of the work directory as well, until it is done."""
    bound: bool = False
    """The memory is not known well: it depends on which layers go, and the stage plans for itself then."""

    def summary(self) -> dict[str, Any]:
        """Plan as JSON."""
        return {
            "stage": self.name,
            "memory_bytes": self.memory_bytes,
            "memory_is": "at most" if self.bound else "planned",
            "disk_bytes": self.disk_bytes + self.state_bytes,
            "seconds": rounded(self.seconds),
        }


@dataclass(slots=True)
class RunPlan:
    """A run before it begins."""

    sizes: Plan
    """Of the model and of what comes out, before it is quantized. If layers go, what comes out is an estimate: which
    ones is not known yet."""
    bytes_after: int
    stages: list[StagePlan] = field(default_factory=list)
    memory_bytes: int = 0
    """What stages may use."""
    rate: float = 0.0
    """Floating-point operations a second that were measured."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the work directory at its largest."""
        return sum(stage.disk_bytes for stage in self.stages) + max(stage.state_bytes for stage in self.stages)

    def summary(self) -> dict[str, Any]:
        """Plan as JSON. Seconds are estimates."""
        return {
            **self.sizes.summary(),
            "bytes_after": self.bytes_after,
            "stages": [stage.summary() for stage in self.stages],
            "memory_bytes": max(stage.memory_bytes for stage in self.stages),
            "memory_there": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "seconds": rounded(sum(stage.seconds for stage in self.stages)),
            "seconds_are": "estimated",
            "measured_flops": round(self.rate),
        }

    def check(self, directory: Path) -> None:
        """Refuses what cannot fit, before anything is computed.

        Args:
            directory: of the work; what a run that was broken off has left there is not written again.

        Raises:
            DoesNotFit: a stage needs more memory than there is.
            InvalidRequest: the disk is too small. Both have the numbers.
        """
        for stage in self.stages:
            if stage.memory_bytes > self.memory_bytes and not stage.bound:
                raise DoesNotFit(
                    f"{stage.name} needs {mib(stage.memory_bytes)} of memory, and there are {mib(self.memory_bytes)}: "
                    "lower tokens_per_forward, or free some",
                    param=stage.name,
                )
        need = max(0, self.disk_bytes - bytes_below(directory)) + MARGIN_BYTES
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if need > free:
            raise InvalidRequest(
                f"the run writes another {mib(need)} below {directory}, and the disk has {mib(free)} free: make room, "
                "or name another directory with --work",
                param="work",
            )


def plan_run(pipeline: Pipeline) -> RunPlan:
    """Plan of a pipeline that has not run yet.

    Raises:
        InvalidRequest: a level is impossible, or the data cannot be read; as of Pipeline.check.
    """
    inputs, settings, machine = pipeline.inputs, pipeline.inputs.settings, pipeline.machine
    schedule = pipeline.check()
    rates = Rates.measured(machine.device, pipeline.progress)
    tokens, items = _tokens(pipeline), inputs.suites.items
    documents = _documents(pipeline)
    with ExitStack() as stack:
        base = Base(inputs.model, stack)
        made = RunPlan(_sizes(base, schedule.left), 0, memory_bytes=machine.memory_bytes, rate=rates.flops)
        stages = made.stages
        if items:
            stages.append(
                StagePlan("baseline", machine.evaluation_bytes(inputs.model), rates.answers(base.config, items))
            )
        config, left = base.config, {kind: count(base.config, kind) for kind in schedule.left}
        nbytes = made.sizes.bytes
        for number, levels in enumerate(schedule.cycles, start=1):
            name = f"cycle-{number:02d}"
            read = rates.copied(nbytes)
            seconds = read + importance_seconds(config, settings.importance, inputs.kinds, tokens, rates)
            loaded = number == 1 and machine.teacher is not None
            memory = importance_bytes(config, settings.importance, machine.device, model_is_loaded=loaded)
            stages.append(StagePlan(f"{name}-1-importance", memory, seconds))
            stages.append(StagePlan(f"{name}-2-prune", STREAM_BYTES, read))
            left = {kind: amount - levels.get(kind, 0) for kind, amount in left.items()}
            after = _sizes(base, left)
            config, nbytes = _config(base, left), after.bytes_after
            stages.append(StagePlan(f"{name}-3-compact", STREAM_BYTES, 2 * rates.copied(nbytes), nbytes))
            if settings.recover is not None:
                how = recovery_settings(settings, machine.device)
                seconds = recovery_seconds(config, base.config, how, rates) + rates.copied(nbytes)
                need = recovery_need(
                    config, base.config, how, documents, levels, teacher_is_loaded=machine.teacher is not None
                )
                stages.append(
                    StagePlan(f"{name}-4-recover", need.memory_bytes, seconds, nbytes, need.state_bytes, need.bound)
                )
        if settings.quantize is not None:
            config = replace(config, float8=Float8Scales(BLOCK))
            nbytes = quantized_bytes(compacted(base, nominal_cut(base.config, schedule.left, mtp=base.mtp)))
            stages.append(StagePlan("quantize", STREAM_BYTES, 3 * rates.copied(nbytes), nbytes))
        if items:
            seconds = rates.answers(config, items)
            # Of layers, which ones go decides how much the caches of what is left take.
            stages.append(StagePlan("evaluate", machine.engine_bytes(config), seconds, bound="layers" in schedule.left))
        stages.append(StagePlan("save", STREAM_BYTES, 2 * rates.copied(nbytes), nbytes))
        made.bytes_after = nbytes
    return made


def _tokens(pipeline: Pipeline) -> int:
    """Tokens that importance reads."""
    inputs, settings = pipeline.inputs, pipeline.inputs.settings
    if inputs.data is None:
        return 0
    codec = TextCodec.from_directory(inputs.model)
    read = Calibration.read(inputs.data, codec, name=inputs.data_name, max_tokens=settings.importance.max_tokens)
    return read.tokens


def _documents(pipeline: Pipeline) -> list[Document]:
    """What a recovery reads."""
    inputs, settings = pipeline.inputs, pipeline.inputs.settings
    if inputs.data is None or settings.recover is None:
        return []
    how = recovery_settings(settings, pipeline.machine.device)
    codec = TextCodec.from_directory(inputs.model)
    read = Examples.read(inputs.data, inputs.held_out, codec, how, name=inputs.data_name)
    return [*read.learnt, *read.held_out]


def _sizes(base: Base, left: Mapping[Kind, int]) -> Plan:
    cut = nominal_cut(base.config, left, mtp=base.mtp)
    return plan(base, compacted(base, cut), cut)


def _config(base: Base, left: Mapping[Kind, int]) -> Qwen3_5Config:
    cut = nominal_cut(base.config, left, mtp=base.mtp)
    found = parse_config(cut_config(base.data, base.config, cut))
    if not isinstance(found, Qwen3_5Config):
        raise TypeError(f"cutting made a {type(found).__name__}")
    return found
