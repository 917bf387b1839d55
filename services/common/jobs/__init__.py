"""Training jobs as data: what a client submits, what the queue stores, what everybody reports. No torch, no Redis.

The same models validate a submission over HTTP, from the CLI and straight from Redis. Unknown fields are refused.
Text stays text here: only the trainer tokenizes (services/common/text renders and masks for both sides). One module a
method.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.common.jobs.base import JobBase, LoraSettings, Message, OptimizerSettings, StrictModel
from services.common.jobs.grpo import GrpoCompletion, GrpoGroup, GrpoJob, Reward, ScoredCompletion
from services.common.jobs.record import Job, JobEvent, JobProgress, JobState
from services.common.jobs.sft import SftExample, SftJob

JobSpec = Annotated[SftJob | GrpoJob, Field(discriminator="kind")]

__all__ = [
    "GrpoCompletion",
    "GrpoGroup",
    "GrpoJob",
    "Job",
    "JobBase",
    "JobEvent",
    "JobProgress",
    "JobSpec",
    "JobState",
    "LoraSettings",
    "Message",
    "OptimizerSettings",
    "Reward",
    "ScoredCompletion",
    "SftExample",
    "SftJob",
    "StrictModel",
]
