"""Health service (grpc.health.v1) of an engine process, on two ports.

| service | SERVING |
|---|---|
| `liveness`, "" | the process works: the threads of loop and trainer run and no step hangs |
| `readiness`, `engine` | requests are accepted: loaded, steps succeed, not draining |
| `temper.v1.Engine`, `temper.v1.Adapters`, `temper.v1.Sessions` | the same as readiness |
| `startup` | the model is loaded; stays so to the end |

The engine's own port has them once it serves. The health port (`TEMPER_HEALTH_PORT`) is there before torch is
imported and answers from threads of its own: a kubelet's probe does no TLS, and must not wait for an event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.errors import Unavailable

if TYPE_CHECKING:
    from services.engine.loop.loop import EngineLoop

LIVENESS: Final = ("liveness", "")
READINESS: Final = ("readiness", "engine", "temper.v1.Engine", "temper.v1.Adapters", "temper.v1.Sessions")
STARTUP: Final = ("startup",)
_PERIOD_SECONDS = 0.5
_THREADS = 4
_WATCHERS = 64
"""Most streams of Watch at a time; they need no thread."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Vitals:
    """Vital signs of the engine loop and of the threads beside it; each may be read from any thread.

    Args:
        alive: tells whether the threads run.
        accepting: tells whether the loop takes requests and its steps succeed.
        stuck_seconds: returns the duration of the loop's present iteration; 0 while it waits for work.
    """

    alive: Callable[[], bool]
    accepting: Callable[[], bool]
    stuck_seconds: Callable[[], float]

    @classmethod
    def of(cls, loop: EngineLoop, *beside: Callable[[], bool]) -> Vitals:
        """Vital signs of a started loop.

        Args:
            beside: each tells whether another thread runs that the process needs.
        """
        return cls(
            alive=lambda: loop.alive and all(alive() for alive in beside),
            accepting=lambda: loop.healthy and loop.status().accepting,
            stuck_seconds=lambda: loop.stuck_seconds,
        )


class ProcessHealth:
    """Health of this process. Thread-safe.

    Args:
        watchdog_seconds: longest step, and longest silence of the event loop, before the process counts as hung; 0: it
            never does. Ignored before the process serves, because the first start compiles and captures for minutes.
    """

    def __init__(self, watchdog_seconds: float = 0.0) -> None:
        self._watchdog = watchdog_seconds
        self._vitals: Vitals | None = None
        self._draining = False
        self._beat = time.monotonic()
        self._hung = False

    def serving(self, vitals: Vitals) -> None:
        """Records that the model is loaded and what says whether requests are taken; also again, behind a sleep."""
        self.beat()
        self._vitals = vitals
        self._draining = False

    def drain(self) -> None:
        """Records that no new requests are taken from now on."""
        self._draining = True

    def beat(self) -> None:
        """Records a sign of life of the event loop."""
        self._beat = time.monotonic()

    @property
    def started(self) -> bool:
        return self._vitals is not None

    @property
    def alive(self) -> bool:
        vitals = self._vitals
        if vitals is None:
            return True
        return (vitals.alive() or self._draining) and not self._hangs(vitals)

    @property
    def ready(self) -> bool:
        vitals = self._vitals
        return vitals is not None and not self._draining and vitals.accepting() and self.alive

    def _hangs(self, vitals: Vitals) -> bool:
        if not self._watchdog:
            return False
        step, events = vitals.stuck_seconds(), time.monotonic() - self._beat
        hung = max(step, events) > self._watchdog
        if hung and not self._hung:
            what = "a step of the engine" if step > self._watchdog else "the event loop"
            log.critical(
                f"{what} hangs: liveness is off",
                seconds=round(max(step, events), 1),
                limit=f"TEMPER_WATCHDOG_SECONDS={self._watchdog:g}",
            )
        self._hung = hung
        return hung

    def statuses(self) -> Mapping[str, int]:
        """Present HealthCheckResponse.ServingStatus of each service."""
        said = ((LIVENESS, self.alive), (READINESS, self.ready), (STARTUP, self.started))
        return {name: _status(good) for names, good in said for name in names}


def _status(good: bool) -> int:
    return int(health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING)


class HealthReporter:
    """Updates the health service on the engine's own port, and records the event loop's signs of life."""

    def __init__(self, state: ProcessHealth) -> None:
        self.servicer = health.aio.HealthServicer()
        self._state = state

    async def run(self) -> None:
        """Publishes changes until it is cancelled."""
        while True:
            self._state.beat()
            await self.publish()
            await asyncio.sleep(_PERIOD_SECONDS)

    async def publish(self) -> None:
        """Publishes now."""
        for service, status in self._state.statuses().items():
            await self.servicer.set(service, status)


class HealthServer:
    """The health port: plaintext gRPC with nothing but grpc.health.v1, in threads of its own.

    Args:
        state: health to report.
        host: address to listen on.
        port: TCP port.
    """

    def __init__(self, state: ProcessHealth, host: str, port: int) -> None:
        self._state = state
        self._address = f"{host}:{port}"
        self._servicer = _Servicer(state)
        self._closed = threading.Event()
        self._server: grpc.Server | None = None
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        """Listens.

        Raises:
            Unavailable: the port is taken, or the address is not this machine's.
        """
        server = grpc.server(
            ThreadPoolExecutor(_THREADS, "health"),
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_THREADS + _WATCHERS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        try:
            server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {self._address}: the port is in use or the address is not this machine's; "
                "set TEMPER_GRPC_HOST and TEMPER_HEALTH_PORT"
            ) from error
        server.start()
        self._server = server
        self._thread.start()

    def publish(self) -> None:
        """Sends the present status to watchers; Check always reads it anew."""
        for service, status in self._state.statuses().items():
            self._servicer.set(service, status)

    def stop(self) -> None:
        """Closes the port."""
        self._closed.set()
        if self._server is not None:
            self._server.stop(None).wait(1.0)

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_SECONDS):
            self.publish()


class _Servicer(health.HealthServicer):
    """Health servicer that reads the state at each Check instead of the last published one."""

    def __init__(self, state: ProcessHealth) -> None:
        super().__init__(experimental_non_blocking=True)
        self._state = state
        self._told: dict[str, int] = {}
        for service, status in state.statuses().items():
            self.set(service, status)

    def set(self, service: str, status: int) -> None:
        """Sends watchers a status only if it has changed."""
        if self._told.get(service) != status:
            self._told[service] = status
            super().set(service, status)

    def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._state.statuses().get(request.service)
        if status is None:
            known = ", ".join(name or '""' for name in self._state.statuses())
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {request.service[:80]!r}; there are {known}")
        return health_pb2.HealthCheckResponse(status=status)
