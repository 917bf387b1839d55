"""Evaluation of a checkpoint on suites, by the code that runs evaluations beside an engine: means with intervals, and
the comparison with the model before the cut, item by item."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from services.common.adapters.names import BASE
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, NotFound
from services.common.evaluation.runs.records import ItemResult, RunRecord, RunResult
from services.common.evaluation.runs.results import compared, scores_of
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.lines import read_suite
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.spec import SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.kinds.evaluate import EvalJob
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.storage.directory_store import DirectoryStore
from services.common.validation.errors import problem
from services.engine.models.weights.shards import Progress
from services.forge.files import file_digest
from services.forge.pipeline.machine import Machine
from services.forge.pipeline.work import Work
from services.trainer.evaluation.run import EvaluationRun, Evaluations

_RUN = "run"
"""Id of the one run of an evaluation's directory."""


@dataclass(frozen=True, slots=True)
class Suites:
    """Versions of suites that a model is evaluated on."""

    store: SuiteStore
    digests: Mapping[str, str] = field(default_factory=dict)
    """"name@n" → digest of its content."""
    items: int = 0
    """Of all of them."""

    @classmethod
    def of(cls, store: SuiteStore, manifests: Sequence[SuiteManifest]) -> Suites:
        """Suites of a store. Raises InvalidRequest: one cannot be used on a model that is not served."""
        for manifest in manifests:
            scorer = manifest.settings.scorer
            if isinstance(scorer, JudgeSpec) and scorer.version is not None:
                raise InvalidRequest(
                    f"suite {manifest.ref} is judged by {scorer.version}: no adapter belongs to a forged model, so "
                    'that its suites are judged by "base", or scored otherwise',
                    param="suites",
                )
        digests = {str(manifest.ref): manifest.digest for manifest in manifests}
        return cls(store, digests, sum(manifest.items for manifest in manifests))

    @classmethod
    def of_files(cls, files: Sequence[Path], work: Work) -> Suites:
        """Suites of files, made versions of a store below a work directory that their contents decide.

        Args:
            files: {suite}.jsonl with items; {suite}.json beside it has everything else.

        Raises:
            InvalidRequest: a file cannot be read or is malformed; file, line and field are named.
        """
        content = [[file.name, file_digest(file), file_digest(file.with_suffix(".json"))] for file in files]
        names = [file.stem for file in files]
        for file, name in zip(files, names, strict=True):
            if names.count(name) > 1:
                raise InvalidRequest(f"{file}: another suite is called {name} as well: rename the file", param="suites")
        place = work.place("suites", {"files": content})
        if files and not place.done:
            # Of a process that was killed: a number that a version was to get is never given again.
            shutil.rmtree(place.state, ignore_errors=True)
            being_made = SuiteStore(DirectoryStore(place.state))
            for file in files:
                _create(being_made, file)
            place.finish()
        store = SuiteStore(DirectoryStore(place.path))
        return cls.of(store, [store.get(name) for name in names])


def _create(store: SuiteStore, file: Path) -> None:
    settings_file = file.with_suffix(".json")
    raw = _read(settings_file, f"the settings of suite {file.name}")
    try:
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{settings_file} is not JSON: {str(error)[:200]}", param="suites") from error
    try:
        settings = SuiteSettings.model_validate(given)
    except ValidationError as error:
        raise InvalidRequest(f"{settings_file}: {problem(error, SuiteSettings, given)}", param="suites") from error
    try:
        store.create(file.stem, settings, read_suite(_read(file, "a suite"), settings))
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}: {error.message}", param="suites") from error


def _read(file: Path, what: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}, {what}: {error.strerror}", param="suites") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8 text", param="suites") from error


def evaluated(
    name: str, model: Path, digest: str, suites: Suites, seed: int, work: Work, machine: Machine, progress: Progress
) -> Evaluated:
    """Evaluation of a checkpoint, by an engine that is started for it. What the work directory has of it is not done
    again.

    Args:
        name: of the stage.
        digest: of the checkpoint.

    Raises:
        NotFound: a suite was deleted meanwhile; what was answered stays.
        InvalidRequest: a suite cannot be run; it is named. DoesNotFit: the engine.
        Unavailable: a webhook failed.
    """
    place = work.place(name, {"model": digest, "suites": suites.digests, "seed": seed, "device": machine.device})
    if not place.done:
        machine.take(name, machine.evaluation_bytes(model), "free some, or leave suites out")
        progress(f"{name}: starting an engine", 0, 0)
        store = DirectoryStore(place.state)
        with machine.open_engine(model) as host:
            run = EvaluationRun(
                Evaluations(EvaluationStore(store), suites.store, AdapterRegistry(store, BASE), host),
                _RUN,
                EvalJob(suites=list(suites.digests), targets=[BASE], seed=seed),
                key_id="",
                retry=machine.retry,
                interrupt=machine.interrupt,
                watcher=_Watcher(name, progress),
            )
            run.run()
        place.finish()
    return Evaluated.read(place.path)


class _Watcher:
    """Watcher of a run that tells a Progress."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress

    def progress(self, done: int, total: int) -> None:
        """See Watcher.progress."""
        self._progress(f"{self._name}: answering", done, total)

    def event(self, data: Mapping[str, Any]) -> None:
        """See Watcher.event."""
        del data

    def kept(self) -> None:
        """See Watcher.kept: of a forge, whole stages count."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A finished evaluation in its directory."""

    record: RunRecord
    result: RunResult
    items: Sequence[Sequence[ItemResult]]
    """Of each suite."""

    @classmethod
    def read(cls, directory: Path) -> Evaluated:
        """Raises NotFound: there is no finished one."""
        store = EvaluationStore(DirectoryStore(directory))
        record, result = store.record(_RUN), store.result(_RUN)
        if record is None or result is None:
            raise NotFound(f"{directory} has no finished evaluation")
        items = [store.items(_RUN, place, 0, 0, suite.items) for place, suite in enumerate(record.suites)]
        return cls(record, result, items)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Suite → mean with its interval and counts, as JSON."""
        return {
            one.suite: one.model_dump(mode="json", exclude={"suite", "target"})
            | {"better": suite.better, "digest": suite.digest}
            for suite, one in zip(self.record.suites, self.result.summaries, strict=True)
        }


def comparison(before: Evaluated, after: Evaluated) -> dict[str, dict[str, Any]]:
    """Suite → how much better the second is than the first, paired item by item, as JSON. Suites whose items are all of
    one group are left out.

    Raises:
        InvalidRequest: they were not made on the same suites.
    """
    found: dict[str, dict[str, Any]] = {}
    if [suite.digest for suite in before.record.suites] != [suite.digest for suite in after.record.suites]:
        raise InvalidRequest("the two evaluations were made on different suites", param="baseline")
    for suite, first, second in zip(after.record.suites, before.items, after.items, strict=True):
        pair = compared(suite, ("before", "after"), scores_of(first), scores_of(second))
        if pair is not None:
            found[suite.suite] = pair.model_dump(mode="json", exclude={"suite", "first", "second"})
    return found
