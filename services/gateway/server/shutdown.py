"""The end of a gateway, from the signal to the last stream.

1. The signal: not ready any more, and every answer closes its connection, so that clients come back through whoever
   balances them. The listener still accepts for `drain_delay_seconds`: endpoints follow readiness a little later.
2. The listener closes. What runs has `shutdown_grace_seconds`; followers of events and background responses hear of it.
3. Completions that are left end with an error event, and the process with status 0.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from services.common.shutdown import Wishes, end_now
from services.gateway.api.base.dependencies import resource
from services.gateway.core.lifecycle import Lifecycle
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.context import InferenceContext
from services.gateway.server.garbage_collection import QuietCollector
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

LAST_WORDS_SECONDS = 2
"""Time in which error events of streams that did not end are written."""


def is_draining(app: FastAPI) -> bool:
    """Whether a signal has come."""
    lifecycle = resource(app, Lifecycle)
    return lifecycle is not None and lifecycle.stopping.is_set()


class Server(uvicorn.Server):
    """uvicorn with a drain in front of its own shutdown."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: GatewaySettings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._wishes = Wishes()
        self._signalled_at: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. From here on the process collects its garbage in quiet moments."""
        await super().startup(sockets)
        inference = resource(self._app, InferenceContext)
        if inference is not None:
            collector = QuietCollector(lambda: inference.admission.taken > 0)
            self._tasks.add(asyncio.create_task(collector.run()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as uvicorn has it
        """Begins the drain, or ends the process if it was asked before.

        The signal is not among those that uvicorn raises again at the end: a drained process ends with status 0.
        """
        if self._wishes.again():
            end_now(sig)
        lifecycle = resource(self._app, Lifecycle)
        if lifecycle is None:  # not started yet
            self.should_exit = True
            return
        lifecycle.stopping.set()

    async def on_tick(self, counter: int) -> bool:
        """True when the listener shall close; uvicorn asks ten times a second."""
        inference = resource(self._app, InferenceContext)
        if inference is not None and is_draining(self._app) and not self.should_exit:
            now, delay = asyncio.get_running_loop().time(), self._settings.drain_delay_seconds
            if self._signalled_at is None:
                self._signalled_at = now
                log.info("draining", accepting_for=delay, running=inference.admission.taken)
            self.should_exit = now - self._signalled_at >= delay
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listener and lets what runs finish, within the grace."""
        lifecycle, inference = resource(self._app, Lifecycle), resource(self._app, InferenceContext)
        if lifecycle is not None and inference is not None:
            lifecycle.stopping.set()
            lifecycle.closing.set()
            self._tasks.add(asyncio.create_task(self._end_completions(inference.engines)))
        await super().shutdown(sockets)

    async def _end_completions(self, engines: EnginePool) -> None:
        grace = self._settings.shutdown_grace_seconds
        await asyncio.sleep(grace)
        engines.end_requests(
            f"the gateway is shutting down and this answer took longer than the {grace} s that are left then "
            "(TEMPER_SHUTDOWN_GRACE_SECONDS): send the request again"
        )
