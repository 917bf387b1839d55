"""Life of a pod after its checks: load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from prometheus_client import CollectorRegistry

from services.common.adapters.events import AdapterEvents
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, Unavailable
from services.common.pb import histories_pb2_grpc, sessions_pb2_grpc
from services.common.security.tls import FOLLOW_SECONDS, Certificates
from services.common.shutdown import SleepLevel, StopSignals, end_now
from services.common.storage.object_store import ObjectStore
from services.common.storage.repeated import repeat
from services.common.telemetry.prometheus import serving
from services.common.telemetry.recent_logs import RecentLogs
from services.common.telemetry.stopwatch import process_seconds
from services.common.telemetry.tracing import Tracer, open_tracer
from services.engine.kv_cache.keys import Tier
from services.engine.observability.events import EventStream
from services.engine.observability.exports import Sources, export
from services.engine.observability.kv_events import KvEventOptions, KvEventPublisher
from services.engine.observability.metrics import EngineMetrics
from services.engine.observability.request_traces import RequestTraces
from services.engine.observability.status import TierStatus
from services.engine.observability.usage import UsageTotals
from services.engine.server.conversation_session_service import ConversationSessionService
from services.engine.server.health import HealthReporter, ProcessHealth, Vitals
from services.engine.server.listen import bind
from services.engine.server.service import make_server
from services.engine.server.serving import Serving
from services.engine.settings import EngineSettings
from services.pod.engine import Engine, build_engine, tune_interpreter, use_threads
from services.pod.parts.loaded import LoadedEngine
from services.pod.training.sessions import TrainingSessionsService
from services.pod.training.thread import Training
from services.trainer.settings import TrainerSettings

_WATCH_SECONDS = 0.5
_CLOSE_SECONDS = 0.5
"""Time for the last frames to be sent after draining, seconds."""

log = structlog.get_logger(__name__)


async def serve(
    settings: EngineSettings,
    trainer: TrainerSettings,
    stop: asyncio.Event,
    health: ProcessHealth,
    certificates: Certificates | None,
    recent: RecentLogs,
    leave: Leave,
    loaded: LoadedEngine | None = None,
) -> LoadedEngine:
    """Runs a pod until ``stop`` is set, or somebody puts it to sleep, then drains it.

    Args:
        leave: told how the process is to go on.
        loaded: of an engine that has slept; None: the model is loaded.
        health: health of the process, kept current.
        certificates: for TLS; None: plaintext.
        recent: last lines of the process's log.

    Returns:
        What may sleep, with nothing that uses it any more.

    Raises:
        TemperError: it cannot start, or a thread that it needs has died; the message is one line.
    """
    started = time.monotonic()
    use_threads(settings.torch_threads)
    metrics = EngineMetrics(CollectorRegistry())
    if certificates is not None:
        certificates.export(metrics.registry)
    # Also while loading: a target that does not answer counts as down.
    with serving(metrics.registry, settings.metrics_host, settings.metrics_port):
        return await _load_and_serve(
            settings, trainer, metrics, stop, started, health, certificates, recent, leave, loaded
        )


async def _load_and_serve(
    settings: EngineSettings,
    trainer: TrainerSettings,
    metrics: EngineMetrics,
    stop: asyncio.Event,
    started: float,
    health: ProcessHealth,
    certificates: Certificates | None,
    recent: RecentLogs,
    leave: Leave,
    loaded: LoadedEngine | None,
) -> LoadedEngine:
    parent = os.getppid()
    store = ObjectStore(settings)
    registry = AdapterRegistry(store, settings.served_model_name)
    adapter_events = AdapterEvents(settings)
    tracer = open_tracer(settings, "engine")
    traces = RequestTraces(tracer) if tracer.on else None
    usage = UsageTotals()
    kv_events = _kv_events(settings)
    listeners = [metrics.listen, usage.listen]
    listeners += [one.listen for one in (traces, kv_events) if one is not None]
    events = EventStream(*listeners)
    build = partial(build_engine, settings, registry, adapter_events, events, store, loaded=loaded)
    engine = await _unless_stopped(asyncio.create_task(asyncio.to_thread(build)), stop)
    leave.levels = engine.loaded.sleeping.levels
    training = Training(settings, trainer, engine, registry, store, metrics.registry, tracer)
    tune_interpreter()
    try:
        await asyncio.to_thread(engine.start)
        await _serve(
            settings,
            engine,
            training,
            metrics,
            usage,
            stop,
            parent,
            started,
            health,
            certificates,
            tracer,
            recent,
            leave,
        )
    finally:
        await asyncio.to_thread(training.drain)
        # Otherwise the adapters' event thread would wait until its next poll ends.
        adapter_events.close()
        await asyncio.to_thread(engine.stop, settings.tier_close_seconds)
        for listener in (traces, kv_events):
            if listener is not None:
                await asyncio.to_thread(listener.close)
        await asyncio.to_thread(tracer.close)
    return engine.loaded


async def _serve(
    settings: EngineSettings,
    engine: Engine,
    training: Training,
    metrics: EngineMetrics,
    usage: UsageTotals,
    stop: asyncio.Event,
    parent: int,
    started: float,
    health: ProcessHealth,
    certificates: Certificates | None,
    tracer: Tracer,
    recent: RecentLogs,
    leave: Leave,
) -> None:
    loop = engine.loop
    reporter = HealthReporter(health)
    serving = Serving(
        loop,
        engine.adapters,
        engine.bind,
        engine.read_drafter,
        engine.constraints,
        engine.codec,
        training.described(engine.description),
        settings.max_waiting,
        training.job_id,
        training.session_counts,
        engine.memory.shares(),
        usage,
        recent,
        engine.memory.block_size,
        leave.to_sleep(stop, health),
    )
    server = make_server(serving, reporter.servicer, settings.max_message_bytes, tracer)
    if training.sessions is not None:
        sessions_pb2_grpc.add_SessionsServicer_to_server(TrainingSessionsService(training.sessions), server)
    sessions = ConversationSessionService(engine.sessions)
    histories_pb2_grpc.add_HistoriesServicer_to_server(sessions, server)
    port = bind(server, settings.grpc_host, settings.grpc_port, certificates)
    export(metrics, sources(settings, engine, lambda: bool(training.job_id()), engine.tier_status))
    training.start()
    health.serving(Vitals.of(loop, lambda: training.alive, lambda: engine.adapters.alive))
    await reporter.publish()
    await server.start()
    background_tasks = [asyncio.create_task(reporter.run())]
    if certificates is not None:
        background_tasks.append(asyncio.create_task(_follow(certificates)))
    log.info(
        "ready",
        address=f"{settings.grpc_host}:{port}",
        model=settings.served_model_name,
        device=engine.description.device,
        seconds=round(time.monotonic() - started, 1),
        process_seconds=process_seconds(),
    )
    try:
        reason = await _watch(stop, lambda: _dead_thread(engine, training), settings.exit_with_parent, parent)
        if not loop.alive:
            raise Unavailable(reason)
        health.drain()
        await reporter.publish()
        await _drain(settings, engine, training)
        if reason:  # the streams have ended regularly
            raise Unavailable(reason)
    finally:
        for task in background_tasks:
            task.cancel()
        await asyncio.gather(*background_tasks, return_exceptions=True)
        await asyncio.to_thread(loop.stop)
        await server.stop(_CLOSE_SECONDS)
        sessions.close()


async def _unless_stopped(loading: asyncio.Task[Engine], stop: asyncio.Event) -> Engine:
    """Waits for the loaded engine. If the pod is asked to stop before, the process exits at once: nothing has begun,
    and a loading thread cannot be interrupted."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("asked to stop while loading")
        sys.stderr.flush()
        os._exit(0)
    stopped.cancel()
    return await loading


async def _follow(certificates: Certificates) -> None:
    await repeat(lambda: asyncio.to_thread(certificates.refresh), FOLLOW_SECONDS, log, "certificates")


def _kv_events(settings: EngineSettings) -> KvEventPublisher | None:
    if not settings.kv_events:
        return None
    topic = settings.kv_events_topic or f"kv@{settings.own_name}@{settings.served_model_name}"
    options = KvEventOptions(settings.kv_events, settings.kv_events_replay, topic, settings.kv_events_kept)
    return KvEventPublisher(options, settings.block_size)


def _dead_thread(engine: Engine, training: Training) -> str:
    """Message about a needed thread that has died; empty: all run."""
    if not engine.loop.alive:
        return "the engine loop died; its log has the reason"
    if not training.alive:
        return "the trainer's thread died; its log has the reason"
    return "" if engine.adapters.alive else "the thread that loads adapters died; its log has the reason"


async def _watch(stop: asyncio.Event, dead_thread: Callable[[], str], with_parent: bool, parent: int) -> str:
    """Waits until the pod must end. Returns "" if it was asked to stop, else the message about a dead thread."""
    while not stop.is_set():
        if reason := dead_thread():
            log.critical(reason)
            return reason
        if with_parent and os.getppid() != parent:
            log.warning("the parent process is gone, stopping")
            return ""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WATCH_SECONDS)
    return ""


async def _drain(settings: EngineSettings, engine: Engine, training: Training) -> None:
    """Lets streams finish while the trainer checkpoints and requeues its job."""
    log.info("draining", running=engine.loop.status().counts.running, seconds=settings.drain_seconds)
    training.stop_soon()
    drained, trained = await asyncio.gather(
        asyncio.to_thread(engine.loop.drain, settings.drain_seconds),
        asyncio.to_thread(training.drain),
    )
    if not trained:
        log.warning("the trainer was still busy; another one will take over its job")
    if not drained:
        log.warning("requests left after drain_seconds are ended", seconds=settings.drain_seconds)


@dataclass(slots=True)
class Leave:
    """How a pod's process goes on once it has drained."""

    level: SleepLevel | None = None
    """It goes to sleep, and gives this back; None: it ends."""
    levels: Set[SleepLevel] = frozenset()
    """Levels besides "process" that this engine has."""

    def to_sleep(self, stop: asyncio.Event, health: ProcessHealth) -> Callable[[SleepLevel], None]:
        """What begins to put the pod to sleep; without effect once it was asked to stop. It raises InvalidRequest at a
        level that this engine does not have."""

        def begin(level: SleepLevel) -> None:
            if level != "process" and level not in self.levels:
                have = ", ".join(sorted({"process", *self.levels}))
                raise InvalidRequest(f"this engine cannot sleep at level {level}: its levels are {have}", param="level")
            if not stop.is_set():
                log.info("going to sleep", level=level)
                self.level = level
                health.drain()
                stop.set()

        return begin


def stop_on_signals(stop: asyncio.Event, health: ProcessHealth, leave: Leave) -> None:
    """Drains on SIGTERM and SIGINT; a further signal later ends the process at once."""
    stop_signals = StopSignals()

    def handle(number: int) -> None:
        if stop_signals.repeated():
            end_now(number)
        leave.level = None
        health.drain()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


def sources(
    settings: EngineSettings,
    engine: Engine,
    training: Callable[[], bool],
    tiers: Callable[[], Mapping[Tier, TierStatus]] = dict,
) -> Sources:
    """Sources for services.engine.observability.exports.

    Args:
        training: tells whether a job runs.
        tiers: returns the status of the tiers; by default there are none.
    """
    return Sources(
        model_name=settings.served_model_name,
        status=engine.loop.status,
        adapters=engine.adapters.snapshot,
        training=training,
        adapter_slots=engine.adapters.num_slots,
        memory=engine.memory,
        device_memory=device_memory(engine.model.device),
        training_waited=lambda: engine.gate.training_waited,
        tiers=tiers,
    )


def device_memory(device: torch.device) -> Callable[[], Mapping[str, int]]:
    """Reader of the device's bytes by kind: total (of the device), reserved (by this process' allocator), allocated (of
    that).

    It asks the allocator, not the driver, so a scrape never waits for the device or disturbs a capture of CUDA graphs.
    Memory of other processes is not included; DCGM's exporter has it.
    """
    if device.type != "cuda":
        return dict
    total = torch.cuda.get_device_properties(device).total_memory

    def read() -> Mapping[str, int]:
        return {
            "total": total,
            "reserved": torch.cuda.memory_reserved(device),
            "allocated": torch.cuda.memory_allocated(device),
        }

    return read
