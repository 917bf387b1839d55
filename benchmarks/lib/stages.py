"""Stages of a start and their times, from what the engine logs while it starts."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping
from typing import Any


class Stages:
    """Record of stages and their times.

    Args:
        zero: time.time() of the beginning.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._at: list[tuple[str, float]] = []

    def done(self, stage: str) -> None:
        """A stage has ended now."""
        self._at.append((stage, time.time() - self._zero))

    def listen(self) -> None:
        """Begins to listen: every line that the engine logs ends a stage; warnings also go to standard error."""
        # Imported here: the time of the first imports is a stage too.
        import structlog

        def note(_: object, level: str, event: MutableMapping[str, Any]) -> Any:
            self.done(f"until {event['event']!r}")
            if level in ("debug", "info"):
                raise structlog.DropEvent
            return event

        structlog.configure(
            processors=[note, structlog.processors.JSONRenderer(default=str)],
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )

    def seconds(self) -> dict[str, float]:
        """Stage → its own seconds, in the order in which they ended."""
        table: dict[str, float] = {}
        before = 0.0
        for stage, at in self._at:
            table[stage] = round(table.get(stage, 0.0) + at - before, 3)
            before = at
        return table

    def total(self) -> float:
        """Seconds from the beginning to the end of the last stage."""
        return round(self._at[-1][1], 3) if self._at else 0.0
