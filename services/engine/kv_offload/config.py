"""What tiers there are, and how much each may hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.engine.kv_offload.messages import Tier
from services.engine.settings import EngineSettings

_HOST_RATE = {"cuda": 40e9, "cpu": 5e9}
"""Bytes a second between the host's memory and the caches, as a first guess."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The tiers of an engine."""

    host: bool
    """Whether the host keeps copies; without it, its memory is only the way to the others."""
    host_bytes: int
    host_rate: float
    """Bytes a second between the host and the device, as a first guess."""
    load_seconds: float
    """After which a load that still waits for bytes has failed."""
    disk_dir: Path | None = None
    """None: no disk."""
    disk_bytes: int = 0
    store: bool = False
    store_bytes: int = 0
    store_poll_seconds: float = 30.0
    store_after_uses: int = 1


def tier_limits(settings: EngineSettings, device: Literal["cpu", "cuda"], memory: int) -> TierLimits | None:
    """What the settings ask for; None: no tiers.

    Args:
        memory: bytes of the machine's memory that this process may use.

    Raises:
        ValueError: the disk tier's directory is no path.
    """
    tiers = {Tier(name) for name in settings.tiers.split(",") if name}
    if not tiers:
        return None
    return TierLimits(
        host=Tier.HOST in tiers,
        host_bytes=settings.tier_host_memory(device, memory),
        host_rate=_HOST_RATE[device],
        load_seconds=settings.tier_load_seconds,
        disk_dir=settings.tier_directory if Tier.DISK in tiers else None,
        disk_bytes=int(settings.tier_disk_bytes),
        store=Tier.STORE in tiers,
        store_bytes=int(settings.tier_store_bytes),
        store_poll_seconds=settings.tier_store_poll_seconds,
        store_after_uses=settings.tier_store_after_uses,
    )
