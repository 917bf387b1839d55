"""Run of an evaluation: shard by shard, each written once, and the result at the end.

What is there is not done again. The seed of an answer follows from the run's seed, the item and the number of the
sample, so a run that was broken off ends in the result of one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Protocol, TypeVar

from services.common.adapters.composition import parse_policy
from services.common.adapters.names import BASE
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, ModelNotFound, NotFound
from services.common.evaluation.runs.plan import RunPlan, plan_run
from services.common.evaluation.runs.records import (
    CANDIDATE,
    ItemResult,
    RunRecord,
    RunResult,
    RunSuite,
    RunTarget,
    Shard,
)
from services.common.evaluation.runs.results import result_of, scores_of
from services.common.evaluation.runs.store import SHARD_ITEMS, EvaluationStore
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.kinds.evaluate import EvalJob, RemoteTarget
from services.common.storage.object_store import ObjectStore
from services.trainer.evaluation.other_server import OtherServer
from services.trainer.evaluation.questions import question_of
from services.trainer.evaluation.scoring import SuiteGrader
from services.trainer.evaluation.targets import Asked, EngineTarget, Said, Target
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Policy
from services.trainer.sampling.prompts import sample_seed

T = TypeVar("T")


class Retry(Protocol):
    """Repeats an operation while a store is away."""

    def __call__(self, operation: Callable[[], T], /) -> T: ...


class Watcher(Protocol):
    """Hears how a run goes."""

    def progress(self, done: int, total: int) -> None:
        """So many items of all suites and targets are answered."""
        ...

    def event(self, data: Mapping[str, Any]) -> None:
        """A target has answered a whole suite."""
        ...

    def kept(self) -> None:
        """Answers were stored that need not be made again."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Dependencies of runs."""

    store: EvaluationStore
    suites: SuiteStore
    registry: AdapterRegistry
    host: PolicyHost

    @classmethod
    def of(cls, store: ObjectStore, registry: AdapterRegistry, host: PolicyHost) -> Evaluations:
        """The runs of one object store."""
        return cls(EvaluationStore(store), SuiteStore(store), registry, host)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Result of a training job that is not a version yet: the last target of the run that decides on it."""

    job: str
    """The job's id."""
    digest: str
    """Digest of its weights."""
    policy: Policy
    """The engine's private copy of it."""

    @property
    def target(self) -> RunTarget:
        """The target as the run's record has it."""
        return RunTarget(name=CANDIDATE, digest=self.digest)


class EvaluationRun:
    """One run, on the trainer's thread.

    Args:
        run: its id: the job's, or one that stands for a candidate with its targets and suites.
        candidate: a target besides the job's.
        retry: repeats what needs the object store.
        interrupt: called several times a second and may raise.
    """

    def __init__(
        self,
        parts: Evaluations,
        run: str,
        job: EvalJob,
        *,
        key_id: str,
        retry: Retry,
        interrupt: Callable[[], None],
        watcher: Watcher,
        candidate: Candidate | None = None,
    ) -> None:
        self._candidate = candidate
        self._parts = parts
        self._run = run
        self._job = job
        self._key_id = key_id
        self._retry = retry
        self._interrupt = interrupt
        self._watcher = watcher

    def run(self) -> RunResult:
        """Answers what is left and writes the result.

        Raises:
            NotFound: a suite or target does not exist, or was deleted meanwhile; what was answered stays.
            InvalidRequest: the run cannot be done; names the suite or target.
            Unavailable: a webhook or another server failed; and what ``interrupt`` raises.
        """
        store, retry = self._parts.store, self._retry
        if (done := retry(lambda: store.result(self._run))) is not None:
            return done
        plan, record = self._begun()
        plan.check_allowed(self._parts.host.grants.granted)
        total = sum(suite.items for suite in record.suites) * len(record.targets)
        counted = 0
        found: dict[tuple[int, int], list[ItemResult]] = {}
        self._watcher.progress(0, total)
        for suite, target in product(range(len(record.suites)), range(len(record.targets))):
            results: list[ItemResult] = []
            answered = False
            for shard, made in self._shards(plan, record, suite, target):
                results += shard.results
                answered = answered or made
                if made:
                    self._watcher.kept()
                self._watcher.progress(counted + len(results), total)
            counted += len(results)
            found[suite, target] = results
            if answered:  # otherwise an earlier attempt has told it
                self._tell(record, suite, target, results)
        result = result_of(record, found, time.time())
        return retry(lambda: store.finish(result))

    def _begun(self) -> tuple[RunPlan, RunRecord]:
        """What the run asks, the same at every attempt."""
        store, retry = self._parts.store, self._retry
        record = retry(lambda: store.record(self._run))
        job = self._job if record is None else self._pinned(record)
        plan = retry(lambda: plan_run(job, self._parts.suites, self._parts.registry, self._parts.host.base_digest))
        if record is None:
            candidate = self._candidate
            made = plan.record(
                self._run,
                self._parts.host.base_digest,
                key_id=self._key_id,
                created_at=time.time(),
                job=None if candidate is None else candidate.job,
                more=() if candidate is None else (candidate.target,),
            )
            record = retry(lambda: store.begin(made, plan.versions))
        if record.base_digest != self._parts.host.base_digest:
            raise InvalidRequest(
                f"the run began on base model {record.base_digest[:12]}, and this engine serves "
                f"{self._parts.host.base_digest[:12]}: run it again",
                param="targets",
            )
        return plan, record

    def _pinned(self, record: RunRecord) -> EvalJob:
        """The job with the versions that its first attempt found."""
        targets = [
            target if isinstance(target, RemoteTarget) else known.name
            for target, known in zip(self._job.targets, record.targets, strict=self._candidate is None)
        ]
        return self._job.model_copy(update={"suites": [suite.suite for suite in record.suites], "targets": targets})

    def _shards(self, plan: RunPlan, record: RunRecord, suite: int, target: int) -> Iterator[tuple[Shard, bool]]:
        """All shards of one target on one suite, in order; what is not there is made, and said to be."""
        store, retry, manifest = self._parts.store, self._retry, plan.suites[suite]
        maker: _ShardMaker | None = None
        for number in range(-(-manifest.items // SHARD_ITEMS)):
            self._interrupt()
            shard = retry(partial(store.shard, self._run, suite, target, number))
            missing = shard is None
            if shard is None:
                maker = maker or _ShardMaker(self._parts, plan, record, suite, target, self._candidate)
                first = number * SHARD_ITEMS
                items = retry(partial(self._parts.suites.items, manifest, first, SHARD_ITEMS))
                made = maker.make(first, items, self._interrupt)
                shard = retry(partial(store.write_shard, self._run, suite, target, number, made))
                if manifest.origin is not None and manifest.origin.dataset is not None:
                    self._keep_if_there(manifest, suite, target, number)
            yield shard, missing

    def _keep_if_there(self, manifest: SuiteManifest, suite: int, target: int, number: int) -> None:
        """Removes a shard whose suite is gone: a user may have been erased who asked one of its items. Raises NotFound.

        Whoever erases deletes suites first and looks at runs then; here it is the other way round.
        """
        try:
            self._retry(partial(self._parts.suites.get, manifest.name, manifest.version))
        except NotFound:
            self._retry(partial(self._parts.store.remove_shard, self._run, suite, target, number))
            raise

    def _tell(self, record: RunRecord, suite: int, target: int, results: Sequence[ItemResult]) -> None:
        invalid = sum(not answer.valid for item in results for answer in item.answers)
        self._watcher.event(
            {
                "suite": record.suites[suite].suite,
                "target": record.targets[target].name,
                "mean": round(scores_of(results).mean, 6),
                "invalid": invalid,
            }
        )


class _ShardMaker:
    """Answers of one target to one suite."""

    def __init__(
        self,
        parts: Evaluations,
        plan: RunPlan,
        record: RunRecord,
        suite: int,
        target: int,
        candidate: Candidate | None,
    ) -> None:
        host, manifest = parts.host, plan.suites[suite]
        self._manifest: SuiteManifest = manifest
        self._suite: RunSuite = record.suites[suite]
        self._seed = record.seed
        self._name = record.targets[target].name
        self._place = f"targets[{target}]"
        is_candidate = candidate is not None and target == len(plan.job.targets)
        chosen = BASE if is_candidate else plan.job.targets[target]
        self._target: Target
        if candidate is not None and is_candidate:
            self._target = EngineTarget(host.rollouts, host.codec, candidate.policy)
        elif isinstance(chosen, RemoteTarget):
            self._target = OtherServer(chosen, host.grants.webhooks, self._place)
        else:
            policy: Policy = parse_policy(chosen)
            self._target = EngineTarget(host.rollouts, host.codec, policy)
        self._sampling = self._suite.sampling or manifest.settings.sampling
        self._grader = SuiteGrader(
            manifest.settings,
            self._sampling,
            host.grants,
            f"suites[{suite}].scorer",
        )

    def make(self, first: int, items: Sequence[SuiteItem], interrupt: Callable[[], None]) -> Shard:
        """A shard of items, of which the first one is at place ``first``."""
        try:
            if self._grader.samples:
                said = self._answers(items, self._sampling, interrupt)
                results = self._grader.graded(first, items, said, interrupt)
            else:
                results = self._grader.read(first, items, self._target, interrupt)
        except (ModelNotFound, NotFound) as error:
            raise ModelNotFound(
                f"{self._place}: {self._name} or the judge of {self._suite.suite} is not there any more: "
                f"{error.message}; what was answered before stays",
                param=self._place,
            ) from error
        except InvalidRequest as error:
            raise InvalidRequest(f"suite {self._suite.suite}: {error.message}", param=error.param) from error
        return Shard(results=tuple(results))

    def _answers(
        self, items: Sequence[SuiteItem], sampling: SuiteSampling, interrupt: Callable[[], None]
    ) -> list[list[Said]]:
        asked = [
            Asked(
                question_of(self._manifest.settings, item), sample_seed(self._seed, self._suite.digest, item.id, number)
            )
            for item in items
            for number in range(sampling.samples)
        ]
        said = self._target.answer(asked, sampling, interrupt)
        return [said[start : start + sampling.samples] for start in range(0, len(said), sampling.samples)]
