"""What a learner's cycle does outside: a data set, a job, a canary, each once for the cycle.

All of it is done on behalf of the API key that the learner belongs to, which no request stands for here.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.adapters.names import parse_adapter_version
from services.common.errors import Conflict, NotFound
from services.common.evaluation.runs.store import EvaluationStore
from services.common.jobs import JOBS, Job
from services.gateway.api.learning.datasets import DatasetServices, Sources, made
from services.gateway.api.training.submission import checked, submitted, without_erased
from services.gateway.api.training.validation import TrainingServices
from services.learning.canaries.beginning import begin_canary
from services.learning.canaries.record import CanaryRecord
from services.learning.canaries.store import CanaryStore
from services.learning.datasets.spec import DatasetSpec
from services.learning.datasets.store import NewDataset, parse_dataset_ref
from services.learning.feedback.store import FeedbackFilter
from services.learning.learners.record import Learner
from services.learning.learners.steps import CycleData

_WRITTEN_SECONDS = 3.0
"""Time that a part of the request log takes from its end to the index."""


def sources_of(learner: Learner) -> Sources:
    """What a learner may learn from."""
    return Sources(learner.key_id, learner.traffic_of)


@dataclass(frozen=True, slots=True)
class LearnerWork:
    """See CycleWork."""

    training: TrainingServices
    datasets: DatasetServices
    canaries: CanaryStore
    runs: EvaluationStore

    async def known_until(self, learner: Learner, now: float) -> float:
        """See CycleWork."""
        known = await self.datasets.threads.run(self.datasets.log.known_until, now)
        lag = self.training.settings.request_log_part_seconds + _WRITTEN_SECONDS
        return max(learner.cycle.until, min(known, now - lag))

    async def waiting(self, learner: Learner) -> int:
        """See CycleWork."""
        data, since, until = learner.policy.data, learner.cycle.until, await self.known_until(learner, time.time())
        count = 0
        if data.feedback:
            count += await self.datasets.feedback.count(FeedbackFilter(learner.traffic_of), since, until)
        if data.logged:
            count += await self.datasets.threads.run(self.datasets.log.count, learner.traffic_of, since, until)
        return count

    async def declared(self, learner: Learner, until: float) -> DatasetSpec:
        """Declaration of a cycle's data set, with rows of those earlier ones that are still there."""
        earlier = [ref for ref in learner.cycle.datasets if await self._is_there(ref)]
        return learner.policy.spec(learner.cycle.until, until, tuple(earlier))

    async def _is_there(self, ref: str) -> bool:
        try:
            await self.datasets.threads.run(self.datasets.store.get, *parse_dataset_ref(ref))
        except NotFound:
            return False
        return True

    async def make_data(self, learner: Learner) -> CycleData:
        """See CycleWork."""
        spec = await self.declared(learner, learner.cycle.data_until)
        new = NewDataset(learner.name, spec, learner.key_id, made_for=learner.cycle_key)
        manifest = await made(self.datasets, new, sources_of(learner))
        report = manifest.report.model_dump(mode="json")
        return CycleData(manifest.ref, {"digest": manifest.digest, "rows": manifest.rows, "report": report})

    async def submit(self, learner: Learner, dataset: str) -> Job:
        """See CycleWork."""
        queue, key = self.training.queue, f"learner {learner.cycle_key}"
        sha = hashlib.sha256(key.encode()).hexdigest()  # of the cycle: the policy may change in the middle of it
        known = await queue.submitted(key, sha, key_id=learner.key_id)
        if known is not None:
            return await without_erased(self.training, known)
        metadata = {"learner": learner.name, "cycle": str(learner.cycle.number)}
        sent = JOBS[learner.policy.method].model_validate(learner.policy.job(dataset, metadata=metadata))
        spec = await checked(self.training, sent)
        return await submitted(self.training, spec, idempotency_key=key, request_sha=sha, key_id=learner.key_id)

    async def job(self, job_id: str) -> Job:
        """See CycleWork."""
        return await self.training.queue.get(job_id)

    async def cancel(self, job_id: str, reason: str) -> None:
        """See CycleWork."""
        with contextlib.suppress(Conflict):
            await self.training.queue.cancel(job_id, reason)

    async def gates(self, job: Job) -> Sequence[Mapping[str, Any]]:
        """See CycleWork."""
        if job.evaluation is None:
            return []
        decided = await self.training.threads.run(self.runs.gates, job.evaluation)
        return [gate.model_dump(mode="json") for gate in decided]

    async def begin_canary(self, learner: Learner, candidate: str) -> CanaryRecord:
        """See CycleWork."""
        if learner.policy.canary is None:
            raise ValueError("the policy has no canary")
        return await begin_canary(
            self.canaries,
            self.training.registry,
            parse_adapter_version(candidate),
            learner.policy.canary,
            canary_id=learner.canary_id,
            owner=learner.key_id,
            origin=learner.name,
            base_digest=self.training.engines.served.info.digest,
        )

    async def canary(self, canary_id: str) -> CanaryRecord:
        """See CycleWork."""
        return await self.canaries.get(canary_id)
