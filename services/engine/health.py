"""grpc.health.v1: "" is liveness (the loop's thread lives), "engine" readiness (it accepts, its steps succeed)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpc_health.v1 import health, health_pb2

LIVENESS = ""
READINESS = "engine"
_PERIOD_SECONDS = 0.5


class HealthReporter:
    """Keeps the health service current.

    Args:
        alive: whether the process can still do its work; false means that it should be restarted.
        ready: whether new requests should come here.
    """

    def __init__(self, alive: Callable[[], bool], ready: Callable[[], bool]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._alive = alive
        self._ready = ready

    async def run(self) -> None:
        """Publishes changes until it is cancelled."""
        while True:
            await self.publish()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def publish(self) -> None:
        """Publishes now."""
        for service, good in ((LIVENESS, self._alive()), (READINESS, self._ready())):
            status = health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
            await self.servicer.set(service, status)
