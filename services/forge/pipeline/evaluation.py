"""Evaluation of a checkpoint on suites, by the code that runs evaluations beside an engine: means with intervals, and
the comparison with the model before the cut, item by item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from services.common.evaluation.suites.names import SuiteVersion
from services.common.evaluation.suites.spec import SuiteSettings
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.kinds.evaluate import EvalJob
from services.common.storage.directory_store import DirectoryStore
from services.common.validation.errors import problem
from services.engine.models.weights.shards import Progress
from services.trainer.evaluation.run import EvaluationRun, Evaluations, Retry
from services.trainer.host.policy_host import PolicyHost

_RUN = "run"
"""Id of the one run of an evaluation's directory."""


@dataclass(frozen=True, slots=True)
class SuiteChoice:
    """A version of a suite, with the digest of its content."""

    ref: SuiteVersion
    digest: str
    items: int


def local_suites(files: Sequence[Path], store: SuiteStore) -> list[SuiteChoice]:
    """Suites of files, made versions of a store.

    Args:
        files: {suite}.jsonl with items; {suite}.json beside it has everything else.

    Raises:
        InvalidRequest: a file cannot be read or is malformed; file, line and field are named.
    """
    made: list[SuiteChoice] = []
    for file in files:
        settings_file = file.with_suffix(".json")
        raw = _read(settings_file, f"the settings of suite {file.name}")
        try:
            given = from_json(raw, allow_inf_nan=False)
            settings = SuiteSettings.model_validate(given)
        except ValidationError as error:
            raise InvalidRequest(f"{settings_file}: {problem(error, SuiteSettings, given)}", param="suites") from error
        except ValueError as error:
            raise InvalidRequest(f"{settings_file} is not JSON: {str(error)[:200]}", param="suites") from error
        try:
            items = read_suite(_read(file, "a suite"), settings)
            manifest = store.create(file.stem, settings, items)
        except InvalidRequest as error:
            raise InvalidRequest(f"{file}: {error.message}", param="suites") from error
        if any(choice.ref.name == manifest.name for choice in made):
            raise InvalidRequest(
                f"{file}: another suite is called {manifest.name} as well: rename the file", param="suites"
            )
        made.append(SuiteChoice(manifest.ref, manifest.digest, manifest.items))
    return made


def _read(file: Path, what: str) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}, {what}: {error.strerror}", param="suites") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8 text", param="suites") from error


def evaluate(
    host: PolicyHost,
    suites: SuiteStore,
    chosen: Sequence[SuiteChoice],
    directory: Path,
    *,
    seed: int,
    progress: Progress,
    interrupt: Callable[[], None],
    retry: Retry,
) -> RunResult:
    """Answers the suites by the host's model. What a directory has of it already is not done again.

    Args:
        directory: gets the answers, shard by shard, and the result.
        interrupt: called several times a second and may raise.

    Raises:
        NotFound: a suite was deleted meanwhile; what was answered stays.
        InvalidRequest: a suite cannot be run; it is named.
        Unavailable: a webhook failed; and what ``interrupt`` raises.
    """
    store = DirectoryStore(directory)
    job = EvalJob(suites=[str(choice.ref) for choice in chosen], targets=[BASE], seed=seed)
    parts = Evaluations(EvaluationStore(store), suites, AdapterRegistry(store, BASE), host)
    run = EvaluationRun(parts, _RUN, job, key_id="", retry=retry, interrupt=interrupt, watcher=_Watcher(progress))
    return run.run()


class _Watcher:
    """Watcher of a run that tells a Progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def progress(self, done: int, total: int) -> None:
        """See Watcher.progress."""
        self._progress("evaluating", done, total)

    def event(self, data: Mapping[str, Any]) -> None:
        """See Watcher.event."""
        del data


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
