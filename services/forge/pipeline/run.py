"""Run of a pipeline: baseline evaluation → (importance → prune → compact → recover) a cycle → quantize → evaluate.

What is cut out is gone from the files before anything recovers. Every stage has a place in the work directory that its
inputs decide, so that a run that was broken off at any moment goes on where it was and ends in the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.jobs.kinds.forge import ForgeSettings
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.registry import read_config
from services.engine.models.weights.shards import Progress
from services.forge.cut import CutFile
from services.forge.files import file_digest
from services.forge.importance.settings import Settings
from services.forge.pipeline.evaluation import Evaluated, Suites, comparison, evaluated
from services.forge.pipeline.machine import Machine, Turn
from services.forge.pipeline.needs import STREAM_BYTES, importance_bytes
from services.forge.pipeline.schedule import Schedule
from services.forge.pipeline.shapes import device_name, gone, shape_of, sizes
from services.forge.pipeline.work import Place, Work
from services.forge.record import Made, described_digest, read_record
from services.forge.recovery.recover import recover
from services.forge.recovery.settings import RecoverySettings
from services.forge.steps import compact_step, importance_step, prune_step, quantize_step
from services.forge.units import KINDS, Kind, cuttable


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a pipeline works on."""

    model: Path
    settings: ForgeSettings
    suites: Suites
    data: Path | None = None
    data_name: str | None = None
    held_out: Path | None = None
    digest: str | None = None
    """Digest that the model must have; None: whichever it has."""

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of units that go."""
        return [kind for kind in KINDS if kind in self.settings.prune.levels]

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in their order, saving counted."""
        settings, evaluated = self.settings, bool(self.suites.digests)
        steps = ["1-importance", "2-prune", "3-compact", *(["4-recover"] if settings.recover is not None else [])]
        cycles = [f"{_cycle_name(number)}-{step}" for number in range(1, settings.prune.cycles + 1) for step in steps]
        return (
            *(["baseline"] if evaluated else []),
            *cycles,
            *(["quantize"] if settings.quantize is not None else []),
            *(["evaluate"] if evaluated else []),
            "save",
        )

    def needed_data(self) -> Path:
        """The data, which importance by data and recovery do not go without. Raises InvalidRequest: there is none."""
        if self.data is None:
            raise InvalidRequest("importance by data and recovery need data: name a file of examples", param="data")
        return self.data

    @property
    def shard_bytes(self) -> int:
        return int(self.settings.max_shard_gb * 1e9)


@dataclass(frozen=True, slots=True)
class Forged:
    """What came of a pipeline: a checkpoint in the work directory, and what is known of it."""

    checkpoint: Path
    digest: str
    made: Made
    """Record of the whole run, to be written beside the checkpoint's copy."""


@dataclass(slots=True)
class Pipeline:
    """One run.

    Args:
        progress: told the stage, and how much of it is done.
    """

    inputs: Inputs
    work: Work
    machine: Machine
    progress: Progress
    _stages: list[dict[str, Any]] = field(default_factory=list)
    """What is told of each stage in the record."""

    def run(self) -> Forged:
        """Does what is not done yet. The work directory must be locked.

        Raises:
            InvalidRequest: a setting or a file is wrong, a level impossible, the disk full; DoesNotFit: the memory.
            NotFound: a suite was deleted meanwhile.
            CheckpointRejected: the model, or a result in the work directory, is not what it was.
        """
        inputs, settings = self.inputs, self.inputs.settings
        schedule = self.check()
        self.progress("digest of the model", 0, 0)
        base_digest = checkpoint_digest(inputs.model)
        if inputs.digest not in (None, base_digest):
            raise CheckpointRejected(
                f"{inputs.model} is not the checkpoint any more that the engine serves: restart the engine"
            )
        data = {
            name: None if file is None else file_digest(file)
            for name, file in (("data", inputs.data), ("held_out", inputs.held_out))
        }
        before = self._evaluation("baseline", inputs.model, base_digest)
        current, digest = inputs.model, base_digest
        for number, levels in enumerate(schedule.cycles, start=1):
            current, digest = self._cycle(number, current, digest, levels, data, base_digest)
        if settings.quantize is not None:
            current, digest = self._quantized(current, digest)
        after = self._evaluation("evaluate", current, digest)
        return Forged(current, digest, self._made(base_digest, current, before, after))

    def check(self) -> Schedule:
        """What is known to be impossible before anything is computed is refused. Returns what each cycle takes."""
        inputs = self.inputs
        config = cuttable(read_config(inputs.model))
        schedule = Schedule.of(config, inputs.settings.prune)
        if inputs.settings.reads_data:
            inputs.needed_data()
        return schedule

    # Stages.

    def _cycle(
        self,
        number: int,
        model: Path,
        digest: str,
        levels: Mapping[Kind, int],
        data: Mapping[str, str | None],
        base_digest: str,
    ) -> tuple[Path, str]:
        """The checkpoint that a cycle makes, and its digest."""
        name, shards = _cycle_name(number), self.inputs.shard_bytes
        scores = self._importance(f"{name}-1-importance", model, digest, data["data"])
        cut = self.work.place(f"{name}-2-prune", {"scores": scores.key, "levels": dict(levels)})
        if not cut.done:
            texts: dict[Kind, str] = {kind: str(amount) for kind, amount in levels.items()}
            prune_step(model, scores.path, cut.path, texts, progress=self._telling(cut.name))
        smaller = self.work.place(f"{name}-3-compact", {"cut": cut.key, "model": digest, "shards": shards})
        if not smaller.done:
            self.machine.take("compact", STREAM_BYTES, "free some")
            telling = self._telling(smaller.name)
            compact_step(model, cut.path, smaller.path, max_shard_bytes=shards, progress=telling)
        widths = gone(smaller.path, CutFile.read(cut.path).cut)
        self._told(smaller.path)
        if self.inputs.settings.recover is None:
            return smaller.path, described_digest(smaller.path)
        recovered = self._recovered(f"{name}-4-recover", smaller, data, base_digest)
        if shape_of(recovered.path) != widths:
            raise CheckpointRejected(
                f"{recovered.path} does not have the shape of {smaller.path}: what went has grown again"
            )
        self._told(recovered.path)
        return recovered.path, described_digest(recovered.path)

    def _importance(self, name: str, model: Path, digest: str, data: str | None) -> Place:
        inputs, settings, device = self.inputs, self.inputs.settings, self.machine.device
        chosen = settings.importance
        place = self.work.place(
            name,
            {
                "model": digest,
                "settings": chosen.model_dump(),
                "kinds": inputs.kinds,
                "data": [data, inputs.data_name],
                "seed": settings.seed,
                "device": device,
            },
        )
        if place.done:
            return place
        loaded = self.machine.loaded(digest)
        nbytes = importance_bytes(read_config(model), chosen, device, model_is_loaded=loaded is not None)
        self.machine.take(
            "importance", nbytes, "lower importance.tokens_per_forward, or take importance.method weights"
        )
        how = Settings(
            method=chosen.method,
            kinds=inputs.kinds,
            tokens_per_forward=chosen.tokens_per_forward,
            sample_tokens=chosen.sample_tokens,
            seed=settings.seed,
        )
        with Turn(self.machine) as turn:
            importance_step(
                model,
                place.path,
                how,
                data=inputs.data,
                data_name=inputs.data_name,
                max_tokens=chosen.max_tokens,
                device=device,
                progress=turn.telling(self._telling(name)),
                loaded=loaded,
                loading=turn.left,
                give_way=turn.give_way,
            )
        return place

    def _recovered(self, name: str, smaller: Place, data: Mapping[str, str | None], base_digest: str) -> Place:
        inputs, machine = self.inputs, self.machine
        settings = recovery_settings(inputs.settings, machine.device)
        distils = settings.method == "distill"
        place = self.work.place(
            name,
            {
                "model": smaller.key,
                "teacher": base_digest if distils else None,
                "settings": settings.record(),
                "data": [data["data"], data["held_out"], inputs.data_name],
                "device": machine.device,
                "shards": inputs.shard_bytes,
            },
        )
        if place.done:
            return place
        stop = _Stop(machine.interrupt)
        with Turn(machine) as turn:

            def stopped() -> bool:
                with turn.left():  # others compute in a pause
                    return stop()

            def reserve(nbytes: int) -> None:
                with turn.left():
                    machine.take("recover", nbytes, "lower recover.tokens_per_forward")

            report = recover(
                smaller.path,
                place.path,
                settings,
                data=inputs.needed_data(),
                data_name=inputs.data_name,
                held_out=inputs.held_out,
                teacher=(machine.teacher or inputs.model) if distils else None,
                state=place.state,
                memory_bytes=machine.memory_bytes,
                max_shard_bytes=inputs.shard_bytes,
                reserve=reserve,
                give_way=turn.give_way,
                pause=stopped,
                progress=turn.telling(self._named(name)),  # it is ended between steps, with its state kept
                should_stop=stopped,
            )
        if report is None:
            raise stop.error
        return place

    def _quantized(self, model: Path, digest: str) -> tuple[Path, str]:
        shards = self.inputs.shard_bytes
        place = self.work.place(
            "quantize", {"model": digest, "format": self.inputs.settings.quantize, "shards": shards}
        )
        if not place.done:
            self.machine.take("quantize", STREAM_BYTES, "free some")
            quantize_step(model, place.path, max_shard_bytes=shards, progress=self._telling(place.name))
        self._told(place.path)
        return place.path, described_digest(place.path)

    def _evaluation(self, name: str, model: Path, digest: str) -> Evaluated | None:
        """Evaluation of a checkpoint; None: there are no suites."""
        suites, seed = self.inputs.suites, self.inputs.settings.seed
        if not suites.digests:
            return None
        return evaluated(name, model, digest, suites, seed, self.work, self.machine, self.progress)

    # Parts.

    def _telling(self, name: str) -> Progress:
        return self.machine.telling(self._named(name))

    def _named(self, name: str) -> Progress:
        def tell(what: str, done: int, total: int) -> None:
            self.progress(f"{name}: {what}", done, total)

        return tell

    def _told(self, checkpoint: Path) -> None:
        record = read_record(checkpoint)
        told = {key: value for key, value in record.items() if key not in _ELSEWHERE}
        self._stages.append(told | {"digest": record["outputs"]["digest"]})

    def _made(self, base_digest: str, checkpoint: Path, before: Evaluated | None, after: Evaluated | None) -> Made:
        """Record of the whole run."""
        inputs, settings = self.inputs, self.inputs.settings
        data = {str(one["sha256"]): one for stage in self._stages for one in stage["data"]}
        more: dict[str, Any] = {"seeds": {"seed": settings.seed}, "stages": self._stages}
        if before is not None and after is not None:
            more["evaluation"] = {
                "before": before.summary(),
                "after": after.summary(),
                "compared": comparison(before, after),
            }
        return Made(
            step="forge",
            base=inputs.model,
            base_digest=base_digest,
            recipe=settings.model_dump(mode="json"),
            plan=sizes(inputs.model, checkpoint),
            data=list(data.values()),
            more=more,
            hardware={"device": device_name(self.machine.device)},
        )


class _Stop:
    """Interrupt of a recovery, which can be asked anywhere: it ends in order, behind its step, and the run with what it
    was ended by."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._errors: list[Exception] = []

    def __call__(self) -> bool:
        if not self._errors:
            try:
                self._interrupt()
            except Exception as error:
                self._errors.append(error)
        return bool(self._errors)

    @property
    def error(self) -> Exception:
        """What ended the run; there is one once it was told to stop."""
        return self._errors[0]


def _cycle_name(number: int) -> str:
    return f"cycle-{number:02d}"


def recovery_settings(settings: ForgeSettings, device: str) -> RecoverySettings:
    """Settings of the recovery after each cut. Raises InvalidRequest."""
    if settings.recover is None:
        raise InvalidRequest("the recipe has no recover", param="recover")
    fields = {name: getattr(settings.recover, name) for name in type(settings.recover).model_fields}
    return RecoverySettings(**fields, seed=settings.seed, device=device)


_ELSEWHERE = ("format", "base", "code", "hardware", "outputs", "history")
"""Fields of a stage's record that the record of the whole run has itself."""
