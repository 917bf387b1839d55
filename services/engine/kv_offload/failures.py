"""Copies that could not be read or written: counted each, logged now and then."""

from __future__ import annotations

import threading
import time

import structlog

from services.engine.kv_cache.keys import Tier
from services.engine.observability.events import CopyFailure, CopyNotMade, EventStream

_LOG_SECONDS = 10.0
"""Seconds between two log lines about the same failure of the same tier."""

log = structlog.get_logger(__name__)


class CopyFailed(Exception):
    """A copy could not be read or written."""

    def __init__(self, reason: CopyFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FailureLog:
    """Counts and logs copies that could not be made. Thread-safe."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._said: dict[tuple[Tier, CopyFailure], float] = {}
        self._silent: dict[tuple[Tier, CopyFailure], int] = {}

    def tell(self, tier: Tier, reason: CopyFailure, message: str) -> None:
        """Counts one, and logs it unless another like it was logged a moment ago."""
        self._events.emit(CopyNotMade(tier, reason))
        kind, now = (tier, reason), time.monotonic()
        with self._lock:
            if now < self._said.get(kind, -_LOG_SECONDS) + _LOG_SECONDS:
                self._silent[kind] = self._silent.get(kind, 0) + 1
                return
            self._said[kind] = now
            silent = self._silent.pop(kind, 0)
        log.warning("tier_trouble", tier=tier.value, trouble=reason, reason=message, more_before=silent)
