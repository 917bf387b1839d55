"""Gates of a training job: what is refused before the first step, and the run of suites that decides behind the last.

The run belongs to the weights that it tries: a later attempt goes on with its answers if it has the same ones, which
the checkpoint behind the last step sees to, and asks anew otherwise.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from services.common.adapters.composition import parse_policy
from services.common.adapters.evidence import ContaminationEvidence, DivergenceEvidence, GateEvidence
from services.common.adapters.manifest import FileEntry, Manifest, files_digest
from services.common.adapters.names import AdapterVersion
from services.common.errors import NotFound, TemperError
from services.common.evaluation.contamination.report import Contamination, contamination_by
from services.common.evaluation.contamination.store import DataSource, TrainingHashes, TrainingLineage
from services.common.evaluation.contamination.texts import training_texts
from services.common.evaluation.gates.decision import Measured, decide
from services.common.evaluation.gates.divergence import bounded
from services.common.evaluation.gates.plan import GatePlan, PlannedGate, plan_gates
from services.common.evaluation.runs.records import GateRecord, ItemResult, RunRecord
from services.common.evaluation.runs.results import scores_of
from services.common.jobs import JobBase, JobProgress, PublishingSpec
from services.engine.models.lora.trainable import LoraParams
from services.trainer.evaluation.divergence import measured, prompts_of
from services.trainer.evaluation.run import Candidate, EvaluationRun, Evaluations
from services.trainer.host.rollouts import Policy
from services.trainer.runtime.attempts.claim import Claim
from services.trainer.runtime.job_link import JobSession

PUBLISH, ATTACH = "publish_if", "attach_if"
_NAMED = 10
"""Items and versions that a message lists."""


class Contaminated(TemperError):
    """A gate was to decide on items that were trained on."""

    code: ClassVar[str] = "contaminated_suite"


class Gates:
    """Gates of one attempt at a job; of a job without any, every method does nothing."""

    def __init__(self, evaluations: Evaluations, hashes: TrainingHashes, claim: Claim, spec: PublishingSpec) -> None:
        self._evaluations = evaluations
        self._hashes = hashes
        self._claim = claim
        self._spec = spec
        self._plan: GatePlan | None = None
        self._contamination: dict[int, ContaminationEvidence] = {}
        """Of the run's suites, by their place, what a gate lets pass."""

    @property
    def asked(self) -> bool:
        """Whether the job has gates on suites."""
        return isinstance(self._spec, JobBase) and bool(self._spec.gates)

    @property
    def _source(self) -> DataSource:
        return DataSource(adapter=self._spec.adapter, job_id=self._claim.job.id)

    def begin(self, parents: Sequence[AdapterVersion]) -> list[str]:
        """Looks up what the gates name and compares their suites with all training data that are known by now; returns
        notes for the user.

        Raises:
            Contaminated: a suite's items were trained on, and its gate does not allow that.
            NotFound, ModelNotFound, AdapterRejected, InvalidRequest: see plan_gates; and what an attempt ends by.
        """
        if not isinstance(self._spec, JobBase) or not self.asked:
            return []
        spec, parts, host = self._spec, self._evaluations, self._evaluations.host
        parent = parents[0] if parents else None
        plan = self._claim.until_back(lambda: plan_gates(spec, parts.suites, parts.registry, host.base_digest, parent))
        if plan is None:
            return []
        plan.run.check_allowed(host.grants.granted)
        self._plan = plan
        self._claim.until_back(lambda: self.keep_hashes(parents))
        notes = plan.warnings()
        for place in range(len(plan.run.suites)):
            notes += self._compare(plan, place)
        return notes

    def keep_hashes(self, parents: Sequence[AdapterVersion], *, cancellable: bool = True) -> None:
        """Keeps what the job learns from as hashes, unless they are there, for the contamination of suites.

        Args:
            cancellable: whether the job may still be cancelled, or paused, meanwhile.
        """
        if self._hashes.begun(self._source) is not None:
            return

        def between() -> None:
            self._claim.session.check(cancellable=cancellable)
            time.sleep(0)  # Python's work on each text holds the lock that the engine's thread waits for

        texts = training_texts(self._spec, self._evaluations.host.codec)
        self._hashes.write(self._source, self._spec.kind, parents, texts, between)

    def decide(self, lora: LoraParams, digest: str, steps: int) -> tuple[GateEvidence, ...]:
        """Runs the suites on the job's result, and decides.

        Args:
            lora: the result.
            digest: see digest_of.
            steps: of the job, all of which are done.

        Raises:
            NotFound: a suite or a version was deleted meanwhile.
            what an attempt ends by.
        """
        plan = self._plan
        if plan is None:
            return ()
        run = self.evaluation(digest)
        interrupt = self._claim.pauses()
        with self._evaluations.host.rollouts.policy(lora, interrupt) as policy:
            EvaluationRun(
                self._evaluations,
                run,
                plan.run.job,
                key_id=self._claim.job.job.key_id or "",
                retry=self._claim.until_back,
                interrupt=interrupt,
                watcher=_Reports(self._claim.session, steps),
                candidate=Candidate(self._claim.job.id, digest, policy),
            ).run()
            distances = {planned.field: self._divergence(plan, planned, policy, interrupt) for planned in plan.gates}
        evidence = tuple(self._decided(planned, run, digest, distances[planned.field]) for planned in plan.gates)
        self._claim.until_back(lambda: self._evaluations.store.decide(run, GateRecord(gates=evidence)))
        return evidence

    def evaluation(self, digest: str) -> str:
        """Id of the run that decides on weights of this digest; empty: there are no gates."""
        if self._plan is None:
            return ""
        asked = [digest, *map(str, self._plan.run.job.targets), *(suite.digest for suite in self._plan.run.suites)]
        return f"{self._claim.job.id}-{hashlib.sha256(' '.join(asked).encode()).hexdigest()[:8]}"

    def published(self, manifest: Manifest) -> None:
        """Has the run found among those of the version that came of it."""
        for run in {gate.evaluation for gate in manifest.gates}:
            self._evaluations.store.of_version(manifest.ref).add(run, self._claim.job.job.key_id or "")

    def _compare(self, plan: GatePlan, place: int) -> list[str]:
        """Compares one suite with the training data; returns notes. Raises Contaminated."""
        suite, interrupt = plan.run.suites[place], self._claim.pauses()

        def compare() -> Contamination:
            lineage = self._hashes.begun(self._source) or TrainingLineage((), (f"job {self._claim.job.id}",))
            return contamination_by(self._evaluations.suites, self._hashes, suite, lineage, interrupt)

        found = self._claim.until_back(compare)
        if found.clean:
            return []
        said = _said(str(suite.ref), found)
        for planned in plan.gates:
            if not planned.gate.allow_contaminated and any(one.suite == place for one in planned.conditions):
                raise Contaminated(
                    f"{planned.field} cannot decide by it: {said}; train without these items or on a version whose "
                    f"training is known, name another suite, or give {planned.field}.allow_contaminated: true",
                    param=planned.field,
                )
        self._contamination[place] = ContaminationEvidence(
            suite=str(suite.ref),
            items=found.items,
            contaminated=len(found.contaminated),
            exact=found.exact,
            unknown=found.unknown,
        )
        return [f"decided all the same, as allow_contaminated asks: {said}"]

    def _divergence(
        self, plan: GatePlan, planned: PlannedGate, policy: Policy, interrupt: Callable[[], None]
    ) -> DivergenceEvidence | None:
        """Distance of the result from what a gate compares it with; None: the gate does not bound it."""
        max_kl, host = planned.gate.max_kl, self._evaluations.host
        if max_kl is None:
            return None
        asked = [plan.run.suites[place] for place in dict.fromkeys(one.suite for one in planned.conditions)]
        prompts = self._claim.until_back(
            lambda: prompts_of(self._evaluations.suites, asked, host.rollouts, host.codec, self._spec.seed)
        )
        before = plan.run.job.targets[planned.against]
        found = measured(host.rollouts, prompts, parse_policy(str(before)), policy, interrupt)
        return bounded(found.values, tokens=found.tokens, max_kl=max_kl)

    def _decided(
        self, planned: PlannedGate, run: str, digest: str, divergence: DivergenceEvidence | None
    ) -> GateEvidence:
        store, retry = self._evaluations.store, self._claim.until_back
        record = retry(lambda: store.record(run))
        if record is None:
            raise NotFound(f"evaluation {run} was deleted meanwhile", param=planned.field)
        measured = []
        for one in planned.conditions:
            before, after = (
                self._items(record, one.suite, target) for target in (planned.against, len(record.targets) - 1)
            )
            measured.append(
                Measured(
                    suite=record.suites[one.suite],
                    kind=one.kind,
                    at_least=one.at_least,
                    before=scores_of(before),
                    after=scores_of(after),
                    invalid=(_invalid(before), _invalid(after)),
                )
            )
        decision = decide(measured, need=planned.gate.need, alpha=planned.gate.alpha)
        asked = {one.suite for one in planned.conditions}
        return GateEvidence(
            gate=planned.field,
            passed=decision.passed and (divergence is None or divergence.passed),
            evaluation=run,
            candidate=digest,
            against=record.targets[planned.against].name,
            need=planned.gate.need,
            alpha=planned.gate.alpha,
            seed=record.seed,
            conditions=decision.conditions,
            contamination=tuple(found for place, found in self._contamination.items() if place in asked),
            divergence=divergence,
        )

    def _items(self, record: RunRecord, suite: int, target: int) -> list[ItemResult]:
        """All items of a suite with a target's answers: the full denominator."""
        count = record.suites[suite].items
        found = self._claim.until_back(lambda: self._evaluations.store.items(record.id, suite, target, 0, count))
        if len(found) != count:
            raise NotFound(f"answers of evaluation {record.id} were deleted meanwhile")
        return found


def digest_of(files: Mapping[str, bytes]) -> str:
    """Digest of a result's files: that of the version which is made of them."""
    return files_digest(
        {name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data)) for name, data in files.items()}
    )


def attaches(spec: PublishingSpec, gates: Sequence[GateEvidence]) -> bool:
    """Whether the result of a job is to be attached, by its `attach` and the decision of its `attach_if`."""
    return spec.attach and all(gate.passed for gate in gates if gate.gate == ATTACH)


def becomes_current(spec: PublishingSpec) -> bool:
    """Whether the result of a job is to be current at once; one that a canary is to try is not."""
    return not (isinstance(spec, JobBase) and spec.candidate)


class _Reports:
    """Reports of the run to the job's record: how many items are answered, beside the steps that are done."""

    def __init__(self, session: JobSession, steps: int) -> None:
        self._session = session
        self._steps = JobProgress(step=steps, total_steps=steps)

    def progress(self, done: int, total: int) -> None:
        """See Watcher.progress."""
        self._session.report(self._steps, {"gate_items_done": done, "gate_items": total})

    def event(self, data: Mapping[str, Any]) -> None:
        """See Watcher.event."""
        self._session.event("eval", data)

    def kept(self) -> None:
        """See Watcher.kept."""
        self._session.kept()


def _invalid(items: Sequence[ItemResult]) -> int:
    return sum(not answer.valid for item in items for answer in item.answers)


def _said(suite: str, found: Contamination) -> str:
    """What was trained on, and what is not known, in words."""
    parts = []
    if found.contaminated:
        named = ", ".join(one.id[:80] for one in found.contaminated[:_NAMED])
        more = len(found.contaminated) - _NAMED
        parts.append(
            f"{len(found.contaminated)} of {found.items} items of {suite} occur in the training data of this job or of "
            f"what it came of, {found.exact} as a whole prompt: {named}" + (f" and {more} more" if more > 0 else "")
        )
    if found.unknown:
        named = ", ".join(found.unknown[:_NAMED])
        parts.append(f"whether {suite} was trained on is not known of {named}")
    return "; ".join(parts)
