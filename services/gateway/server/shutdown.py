"""The gateway's process: garbage collection while it runs, and its end from the signal to the last stream.

1. The signal: not ready any more, and every answer closes its connection, so that clients come back through whoever
   balances them. The listener still accepts for `drain_delay_seconds`: endpoints follow readiness a little later.
2. The listener closes. What runs has `shutdown_grace_seconds`; followers of events and background responses hear of it.
3. Completions that are left end with an error event, and the process with status 0.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from services.common.shutdown import StopSignals, end_now
from services.gateway.api.base.routing import resource
from services.gateway.core.admission import Lifecycle
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.context import InferenceContext
from services.gateway.settings import GatewaySettings

_YOUNG = 5_000
"""Objects that are made and not freed between two looks at the youngest: some milliseconds."""
_NEVER = 1_000_000_000
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 60.0
_OVERDUE_SECONDS = 3600.0


class QuietCollector:
    """Python's garbage collector, kept out of the way of streams. One a process, whose collector ``run`` takes over.

    A full collection stops the process for about a microsecond an object, and every open stream has a few hundred: with
    a thousand streams all of them stood still for 0.2 to 0.4 s several times a minute, and nothing was ever found, as
    references are counted and requests leave no cycles (measured by benchmarks.gateway.load). So only the youngest
    objects are looked at while requests run, and all of them when none does, or when that has not been for long.

    Args:
        busy: whether anybody would notice a pause now.
        pause_seconds: between two collections.
        overdue_seconds: after so long it collects all the same.
        look_seconds: how often it looks whether the moment is quiet.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        *,
        pause_seconds: float = _PAUSE_SECONDS,
        overdue_seconds: float = _OVERDUE_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._busy = busy
        self._pause = pause_seconds
        self._overdue = overdue_seconds
        self._look = look_seconds
        self.collections = 0

    async def run(self) -> None:
        """Collects garbage until it is cancelled; then the collector is as it was."""
        thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()  # modules and routes: they stay, there is nothing to look for in them
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        loop = asyncio.get_running_loop()
        last = loop.time()
        try:
            while True:
                await asyncio.sleep(self._look)
                since = loop.time() - last
                if since >= self._overdue or (since >= self._pause and not self._busy()):
                    gc.collect()
                    self.collections += 1
                    last = loop.time()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()


log = structlog.get_logger(__name__)

LAST_WORDS_SECONDS = 2
"""Time in which error events of streams that did not end are written."""


def is_draining(app: FastAPI) -> bool:
    """True once a signal has told the gateway to shut down."""
    lifecycle = resource(app, Lifecycle)
    return lifecycle is not None and lifecycle.stopping.is_set()


class Server(uvicorn.Server):
    """uvicorn with a drain in front of its own shutdown."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: GatewaySettings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._stop_signals = StopSignals()
        self._signalled_at: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen. From here on the process collects its garbage in quiet moments."""
        await super().startup(sockets)
        inference = resource(self._app, InferenceContext)
        if inference is not None:
            collector = QuietCollector(lambda: inference.admission.in_flight > 0)
            self._tasks.add(asyncio.create_task(collector.run()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as uvicorn has it
        """Begins the drain, or ends the process if it was asked before.

        The signal is not among those that uvicorn raises again at the end: a drained process ends with status 0.
        """
        if self._stop_signals.repeated():
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
                log.info("draining", accepting_for=delay, running=inference.admission.in_flight)
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
