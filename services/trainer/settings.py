"""Settings of the trainer thread. Variables are `TEMPER_` + the field name in capitals."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.settings import CommonSettings


class TrainerSettings(CommonSettings):
    """How jobs are claimed, kept alive and made resumable."""

    trainer_name: str | None = None
    """Name of this process in the consumer group; None: host, process id and a random part."""
    job_reclaim_seconds: float = Field(30.0, gt=0)
    """Silence after which a job's owner counts as dead and another trainer takes the job over."""
    job_heartbeat_seconds: float = Field(1.0, gt=0)
    """Between two signs of life; also how soon a cancellation is noticed. Keep well below job_reclaim_seconds."""
    job_max_attempts: int = Field(3, ge=1)
    """Deliveries after which a job goes to the dead letter stream."""
    checkpoint_dir: Path = Path(".temper/checkpoints")
    """Where checkpoints wait while the object store is away."""
    checkpoints_kept: int = Field(2, ge=1)
    """Newest checkpoints that stay in the object store while a job runs."""
    trainer_drain_seconds: float = Field(20.0, gt=0)
    """How long a draining trainer tries to hand its job back in order."""
    adapter_sync_seconds: float = Field(30.0, gt=0)
    """How long a finished job waits until the engine beside it serves the new version."""
    adapter_versions_kept: int | None = Field(None, ge=1)
    """After each publish, versions of the adapter beyond this many newest ones are removed, unless
    TEMPER_ADAPTER_DAYS_KEPT, a pointer or an unfinished job keeps them; unset: all stay."""
    adapter_days_kept: float | None = Field(None, ge=0)
    """After each publish, versions of the adapter older than this are removed, unless TEMPER_ADAPTER_VERSIONS_KEPT, a
    pointer or an unfinished job keeps them; unset: all stay."""
