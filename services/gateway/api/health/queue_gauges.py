"""What waits in Redis, for metrics: asked when somebody scrapes, and not more often than every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from services.common.errors import TemperError
from services.common.queue.depth import QueueDepth
from services.gateway.core.metrics import GatewayMetrics

_FRESH_SECONDS = 5.0
_PATIENCE_SECONDS = 1.0
"""A scrape must not wait longer for a frozen Redis."""


class Queue(Protocol):
    """What is asked of a queue."""

    async def depth(self) -> QueueDepth:
        """Raises Unavailable."""
        ...


class QueueWatch:
    """Keeps the gauges of the queues. On the event loop.

    Args:
        queues: by the name that the gauges have for them.
        metrics: where the gauges are.
    """

    def __init__(self, queues: Mapping[str, Queue], metrics: GatewayMetrics) -> None:
        self._queues = queues
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._due = 0.0

    async def refresh(self) -> None:
        """Asks again if the answer is old. While Redis is away there are no gauges of queues, rather than old ones."""
        async with self._lock:
            if time.monotonic() < self._due:
                return
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    depths = {name: await queue.depth() for name, queue in self._queues.items()}
            except (TemperError, TimeoutError):
                depths = {}
            self._show(depths)
            self._due = time.monotonic() + _FRESH_SECONDS

    def _show(self, depths: Mapping[str, QueueDepth]) -> None:
        series = self._metrics
        series.redis_up.set(bool(depths))
        for gauge in (series.jobs, series.dead_letters, series.oldest_queued):
            gauge.clear()
        for name, depth in depths.items():
            series.jobs.labels(name, "queued").set(depth.queued)
            series.jobs.labels(name, "running").set(depth.running)
            series.dead_letters.labels(name).set(depth.dead)
            series.oldest_queued.labels(name).set(depth.oldest_queued_seconds)
