"""Every kind of training job. A method is added to ``Spec`` here; mypy then names each place that must know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias, get_args

from pydantic import Field

from services.common.jobs.dpo import DpoJob
from services.common.jobs.grpo import GrpoJob
from services.common.jobs.kto import KtoJob
from services.common.jobs.sft import SftJob

Spec: TypeAlias = SftJob | DpoJob | KtoJob | GrpoJob
JobSpec = Annotated[Spec, Field(discriminator="kind")]
JOBS: Mapping[str, type[Spec]] = {str(model.model_fields["kind"].default): model for model in get_args(Spec)}
"""The request of each kind, by its name."""
