"""Resources of /v1/train/sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.gateway.api.base.dependencies import provided
from services.gateway.core.admission import Lifecycle
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.training_sessions import TrainingSessionRouter


@dataclass(frozen=True, slots=True)
class TrainingSessionServices:
    """Training sessions, each in one of the engines."""

    engines: EnginePool
    sessions: TrainingSessionRouter
    lifecycle: Lifecycle


TrainingSessions = Annotated[TrainingSessionServices, provided(TrainingSessionServices)]
