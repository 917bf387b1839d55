"""What tiers there are, and how much each may hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
