"""Training jobs as data: what a client submits, what the queue stores, what everybody reports. No torch, no Redis.

The same models validate a submission over HTTP, from the CLI and straight from Redis. Unknown fields are refused.
Text stays text here: only the trainer tokenizes (services/common/text renders and masks for both sides). One module a
method; `spec` lists them.
"""

from __future__ import annotations

from services.common.jobs.base import JobBase, OptimizerSettings, PublishingJob
from services.common.jobs.examples import ExampleJob
from services.common.jobs.fields.acceptance import Better, PublishIf
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.fields.messages import Message
from services.common.jobs.fields.prompts import AskedExample, SampledPrompt
from services.common.jobs.kinds.dpo import DpoExample, DpoJob
from services.common.jobs.kinds.draft import DraftJob
from services.common.jobs.kinds.evaluate import EvalJob, RemoteTarget
from services.common.jobs.kinds.forge import ForgeJob
from services.common.jobs.kinds.grpo import GrpoJob
from services.common.jobs.kinds.kto import KtoExample, KtoJob
from services.common.jobs.kinds.merge import SPARSE_METHODS, MergeJob, MergeMethod, MergeSettings, MergeSource
from services.common.jobs.kinds.opd import CHECKPOINT, DistillPrompt, OpdJob
from services.common.jobs.kinds.rollouts import GrpoCompletion, GrpoGroup, ScoredCompletion, check_spread
from services.common.jobs.kinds.sft import SftExample, SftJob
from services.common.jobs.record import Job, JobEvent, JobProgress, JobState
from services.common.jobs.registry import JOBS, KINDS, JobSpec, PublishingSpec, Spec, TrainingSpec
from services.common.jobs.trajectories.segments import Action, Observation, Reward, Trajectory
from services.common.validation.strict_models import SentModel

__all__ = [
    "CHECKPOINT",
    "JOBS",
    "KINDS",
    "SPARSE_METHODS",
    "Action",
    "AskedExample",
    "Better",
    "DistillPrompt",
    "DpoExample",
    "DpoJob",
    "DraftJob",
    "EvalJob",
    "ExampleJob",
    "ForgeJob",
    "GrpoCompletion",
    "GrpoGroup",
    "GrpoJob",
    "Job",
    "JobBase",
    "JobEvent",
    "JobProgress",
    "JobSpec",
    "JobState",
    "KtoExample",
    "KtoJob",
    "LoraSettings",
    "MergeJob",
    "MergeMethod",
    "MergeSettings",
    "MergeSource",
    "Message",
    "Observation",
    "OpdJob",
    "OptimizerSettings",
    "PublishIf",
    "PublishingJob",
    "PublishingSpec",
    "RemoteTarget",
    "Reward",
    "SampledPrompt",
    "ScoredCompletion",
    "SentModel",
    "SftExample",
    "SftJob",
    "Spec",
    "TrainingSpec",
    "Trajectory",
    "check_spread",
]
