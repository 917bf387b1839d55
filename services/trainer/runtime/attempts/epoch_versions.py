"""Versions of a job's weights at the ends of its epochs, besides its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.adapters.names import AdapterVersion
from services.common.jobs import PublishingSpec
from services.common.jobs.examples import ExampleJob
from services.trainer.jobs.base import JobRun
from services.trainer.runtime.attempts.claim import Claim
from services.trainer.runtime.attempts.gates import Gates
from services.trainer.runtime.publish import Publisher


@dataclass(frozen=True, slots=True)
class EpochVersions:
    """Publishes what a job asks for as candidates, each once, however often its steps are repeated."""

    claim: Claim
    spec: PublishingSpec
    publisher: Publisher
    gates: Gates
    parents: Sequence[AdapterVersion]
    base_model: str
    """Name of the base model, in the files."""

    def steps(self, run: JobRun) -> frozenset[int]:
        """Numbers of finished steps behind which there is one to publish."""
        spec = self.spec
        if not isinstance(spec, ExampleJob) or spec.epoch_versions is None:
            return frozenset()
        epochs = int(run.settings["epochs"])
        steps = run.total_steps // epochs
        return frozenset(epoch * steps for epoch in range(max(1, epochs - spec.epoch_versions), epochs))

    def publish(self, run: JobRun, step: int, metrics: Mapping[str, float]) -> None:
        """Publishes the weights as they are behind this step. Raises what an attempt ends by."""
        claimed, session, spec = self.claim.job, self.claim.session, self.spec
        files = run.files(self.base_model)

        def once() -> str:
            self.gates.keep_hashes(self.parents)
            manifest = self.publisher.publish(
                spec.adapter,
                claimed.id,
                files,
                step=step,
                parent=self.parents[0] if self.parents else None,
                metrics=metrics,
                dataset=spec.learnt if isinstance(spec, ExampleJob) else None,
                current=False,
                fence=session.fence,
            )
            return str(manifest.ref)

        ref = self.claim.until_back(once)
        session.event("log", {"message": f"published {ref}, the weights behind step {step}"})
