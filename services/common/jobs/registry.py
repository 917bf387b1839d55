"""Every kind of job. A kind that trains is one line in ``TrainingSpec``; the routes, the rules of access, the command
line and the trainer find it by that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias, get_args

from pydantic import Field

from services.common.jobs.kinds.dpo import DpoJob
from services.common.jobs.kinds.draft import DraftJob
from services.common.jobs.kinds.evaluate import EvalJob
from services.common.jobs.kinds.forge import ForgeJob
from services.common.jobs.kinds.grpo import GrpoJob
from services.common.jobs.kinds.kto import KtoJob
from services.common.jobs.kinds.merge import MergeJob
from services.common.jobs.kinds.opd import OpdJob
from services.common.jobs.kinds.sft import SftJob

TrainingSpec: TypeAlias = SftJob | DpoJob | KtoJob | GrpoJob | OpdJob | DraftJob
"""A job that trains."""
PublishingSpec: TypeAlias = TrainingSpec | MergeJob
"""A job whose result is a version of an adapter."""
Spec: TypeAlias = PublishingSpec | EvalJob | ForgeJob
JobSpec = Annotated[Spec, Field(discriminator="kind")]
JOBS: Mapping[str, type[TrainingSpec]] = {
    str(model.model_fields["kind"].default): model for model in get_args(TrainingSpec)
}
"""Schemas of the jobs that train, by their `kind`."""
KINDS: tuple[str, ...] = tuple(str(model.model_fields["kind"].default) for model in get_args(Spec))
"""All that a job may be."""
