"""`python -m services.pod.asleep`: a pod that sleeps. The process of an engine becomes one, and an engine again.

It keeps the ports and knows nothing of a model: no torch, no memory of the device. The process is replaced (execv), so
that all of that is given back whatever held it; its id stays, and with it who supervises it.
docs/decisions/sleep-replaces-the-process.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry, Gauge

from services.common.errors import TemperError, Unavailable
from services.common.pb import engine_pb2 as pb
from services.common.security.tls import FOLLOW_SECONDS, Certificates
from services.common.shutdown import ASLEEP
from services.common.telemetry.logging import configure_logging
from services.common.telemetry.prometheus import serve as serve_metrics
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

    def __init__(self, woken: asyncio.Event) -> None:
        self._woken = woken
        calls = {"GetStatus": self._status, "Sleep": self._sleep, "Wake": self._wake}
        self._calls = {f"/temper.v1.Engine/{name}": call for name, call in calls.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Handler of a call, whichever it is."""
        return grpc.unary_unary_rpc_method_handler(self._calls.get(handler_call_details.method, self._refuse))

    async def _status(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return pb.EngineStatus(asleep=True).SerializeToString()

    async def _sleep(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        return pb.SleepResponse(asleep=True).SerializeToString()

    async def _wake(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        self._woken.set()
        return pb.WakeResponse(asleep=True).SerializeToString()

    async def _refuse(self, request: bytes, context: Any) -> None:  # noqa: ARG002
        await context.abort(grpc.StatusCode.UNAVAILABLE, ASLEEP)


async def _sleep(settings: EngineSettings, health: ProcessHealth, certificates: Certificates | None) -> bool:
    """Sleeps until it is woken (True) or asked to stop."""
    woken, stop, parent = asyncio.Event(), asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reporter = HealthReporter(health)
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(reporter.servicer, server)
    server.add_generic_rpc_handlers((_Asleep(woken),))  # behind the others: it takes every call
    port = bind(server, settings.grpc_host, settings.grpc_port, certificates)
    await reporter.publish()
    await server.start()
    tasks = [asyncio.create_task(reporter.run())]
    if certificates is not None:
        tasks.append(asyncio.create_task(_follow(certificates)))
    log.info("asleep", address=f"{settings.grpc_host}:{port}", model=settings.served_model_name)
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
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        await asyncio.to_thread(certificates.refresh)


def _tell_metrics(settings: EngineSettings) -> None:
    registry = CollectorRegistry()
    Gauge(ASLEEP_METRIC, ASLEEP_TEXT, registry=registry).set(1)
    try:
        serve_metrics(registry, settings.metrics_host, settings.metrics_port)
    except OSError as error:
        raise Unavailable(
            f"cannot serve metrics on {settings.metrics_host}:{settings.metrics_port}: {error.strerror}"
        ) from error


def main() -> int:
    """Sleeps, and becomes an engine when woken. Returns the exit status: 0 if it was asked to stop, 1 with one line on
    stderr if it cannot sleep here."""
    probes: HealthServer | None = None
    try:
        settings, trainer = read_settings()
        configure_logging(settings, trainer, service="engine")
        health = ProcessHealth(settings.watchdog_seconds)
        health.serving(Vitals(alive=lambda: True, accepting=lambda: False, stuck_seconds=lambda: 0.0))
        if settings.health_port:
            probes = HealthServer(health, settings.grpc_host, settings.health_port)
            probes.start()
        if settings.metrics_port:
            _tell_metrics(settings)
        woken = asyncio.run(_sleep(settings, health, check_tls(settings)))
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
