"""Load of the engine of a gateway that serves one engine, asked for when somebody scrapes."""

from __future__ import annotations

import asyncio

import structlog
from grpc import aio

from services.common.pb import engine_pb2
from services.gateway.core.engine_series import EngineSeries
from services.gateway.engines.pool import EnginePool

log = structlog.get_logger(__name__)

_FRESH_SECONDS = 0.02
"""Endpoint pickers ask every 50 ms; several of them share an answer."""
_PATIENCE_SECONDS = 1.0


class EngineWatch:
    """Sets the series of the engine. Used on the event loop only.

    A gateway whose `engines` are several addresses, or a name, has no such series: Prometheus has those of each engine.

    Args:
        engines: the pool.
        series: what is exported.
    """

    def __init__(self, engines: EnginePool, series: EngineSeries) -> None:
        self._engines = engines
        self._series = series
        self._lock = asyncio.Lock()
        self._due = 0.0

    async def refresh(self) -> None:
        """Asks the engine, unless it has just been asked. One that does not answer within a second has no series."""
        client = self._engines.only
        if client is None:
            return
        async with self._lock:
            loop = asyncio.get_running_loop()
            if loop.time() < self._due:
                return
            self._series.clear()
            model = client.model
            if model is not None and client.connected:
                try:
                    request = engine_pb2.GetStatusRequest()
                    status = await client.engine_stub().GetStatus(request, timeout=_PATIENCE_SECONDS)
                    self._series.show(model, status)
                except aio.AioRpcError as error:
                    log.warning("engine does not report its load", engine=client.address, code=error.code().name)
            self._due = loop.time() + _FRESH_SECONDS
