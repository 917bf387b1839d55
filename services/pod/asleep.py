"""A pod that sleeps: it keeps the ports, tells that it sleeps, and can be woken.

`python -m services.pod.asleep` is one that knows nothing of a model: no torch, no memory of the device. The process of
an engine becomes it, and an engine again. It is replaced (execv), so that all of that is given back whatever held it;
its id stays, and with it who supervises it. docs/decisions/sleep-replaces-the-process.md.

At the other levels the process stays as it is, and sleep() is what it does until it is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry, Gauge

from services.common.errors import DoesNotFit, TemperError
from services.common.pb import engine_pb2 as pb
from services.common.security.tls import FOLLOW_SECONDS, Certificates
from services.common.shutdown import ASLEEP, SleepLevel
from services.common.storage.repeated import repeat
from services.common.telemetry.logging import configure_logging
from services.common.telemetry.prometheus import serving
from services.engine.observability.metrics import ASLEEP_METRIC, ASLEEP_TEXT
from services.engine.server.health import HealthReporter, HealthServer, ProcessHealth, Vitals
from services.engine.server.listen import bind
from services.engine.settings import EngineSettings
from services.pod.preflight import check_tls, read_settings

_ANSWER_SECONDS = 1.0
"""Time for the answer to the call that wakes it."""
_WATCH_SECONDS = 0.5

log = structlog.get_logger(__name__)


def become(module: str) -> NoReturn:
    """Replaces this process by ``python -m module`` with its id, environment and standard streams, and nothing else."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/dev/fd"):
        number = int(name)
        with contextlib.suppress(OSError):  # the one that listed them is closed by now
            os.set_inheritable(number, number <= sys.stderr.fileno())
    os.execv(sys.executable, [sys.executable, "-m", module])


class _Asleep(grpc.GenericRpcHandler):
    """All services of a pod that sleeps: it can be woken and tells its status; other calls hear that it sleeps."""

    def __init__(self, woken: asyncio.Event, level: SleepLevel, wake: Callable[[], None]) -> None:
        self._woken, self._level, self._take_back = woken, level, wake
        self._waking = asyncio.Lock()
        calls = {"GetStatus": self._status, "Sleep": self._sleep, "Wake": self._wake}
        self._calls = {f"/temper.v1.Engine/{name}": call for name, call in calls.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Handler of a call, whichever it is."""
        return grpc.unary_unary_rpc_method_handler(self._calls.get(handler_call_details.method, self._refuse))

    async def _status(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return pb.EngineStatus(asleep=True, sleep_level=self._level).SerializeToString()

    async def _sleep(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return pb.SleepResponse(asleep=True).SerializeToString()

    async def _wake(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        async with self._waking:
            if not self._woken.is_set():
                try:
                    await asyncio.to_thread(self._take_back)
                except DoesNotFit as error:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
                self._woken.set()
        return pb.WakeResponse(asleep=True).SerializeToString()

    async def _refuse(self, request: bytes, context: Any) -> None:  # noqa: ARG002
        await context.abort(grpc.StatusCode.UNAVAILABLE, ASLEEP)


async def sleep(
    settings: EngineSettings,
    health: ProcessHealth,
    certificates: Certificates | None,
    level: SleepLevel = "process",
    wake: Callable[[], None] = lambda: None,
) -> bool:
    """Sleeps until it is woken (True) or asked to stop.

    Args:
        level: what was given back.
        wake: takes it again, before whoever wakes it has an answer; raises DoesNotFit if it cannot.

    Raises:
        Unavailable: its metrics cannot be served.
    """
    health.serving(Vitals(alive=lambda: True, accepting=lambda: False, stuck_seconds=lambda: 0.0))
    registry = CollectorRegistry()
    Gauge(ASLEEP_METRIC, ASLEEP_TEXT, registry=registry).set(1)
    with serving(registry, settings.metrics_host, settings.metrics_port):
        return await _sleep(settings, health, certificates, level, wake)


async def _sleep(
    settings: EngineSettings,
    health: ProcessHealth,
    certificates: Certificates | None,
    level: SleepLevel,
    wake: Callable[[], None],
) -> bool:
    woken, stop, parent = asyncio.Event(), asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reporter = HealthReporter(health)
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(reporter.servicer, server)
    server.add_generic_rpc_handlers((_Asleep(woken, level, wake),))  # behind the others: it takes every call
    port = bind(server, settings.grpc_host, settings.grpc_port, certificates)
    await reporter.publish()
    await server.start()
    tasks = [asyncio.create_task(reporter.run())]
    if certificates is not None:
        tasks.append(asyncio.create_task(_follow(certificates)))
    log.info("asleep", address=f"{settings.grpc_host}:{port}", model=settings.served_model_name, level=level)
    try:
        while not woken.is_set() and not stop.is_set():
            if settings.exit_with_parent and os.getppid() != parent:
                log.warning("the parent process is gone, stopping")
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), _WATCH_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(_ANSWER_SECONDS)
    return woken.is_set() and not stop.is_set()


async def _follow(certificates: Certificates) -> None:
    await repeat(lambda: asyncio.to_thread(certificates.refresh), FOLLOW_SECONDS, log, "certificates")


def main() -> int:
    """Sleeps, and becomes an engine when woken. Returns the exit status: 0 if it was asked to stop, 1 with one line on
    stderr if it cannot sleep here."""
    probes: HealthServer | None = None
    try:
        settings, trainer = read_settings()
        configure_logging(settings, trainer, service="engine")
        health = ProcessHealth(settings.watchdog_seconds)
        if settings.health_port:
            probes = HealthServer(health, settings.grpc_host, settings.health_port)
            probes.start()
        woken = asyncio.run(sleep(settings, health, check_tls(settings)))
    except TemperError as error:
        sys.stderr.write(f"temper engine: {error.message}\n")
        return 1
    finally:
        if probes is not None:
            probes.stop()
    if woken:
        log.info("waking")
        become("services.pod")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
