"""GRPO jobs: on rollouts that they have, or on those that they sample."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.jobs import GrpoJob
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.rollouts.completion_run import RolloutRun
from services.trainer.jobs.rollouts.episode_run import EpisodeRun


def prepare(spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> GrpoRun:
    """The run of a GRPO job: on the rollouts that it has, or on those that it samples.

    Raises:
        InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
    """
    if spec.generate is None:
        return GrpoRun.prepare(spec, host, parent)
    return (RolloutRun if spec.generate.environment is None else EpisodeRun).prepare(spec, host, parent)
