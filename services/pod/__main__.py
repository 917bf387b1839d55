"""`python -m services.pod`: engine and trainer of one device, configured by TEMPER_* (services/engine/settings.py).

`python -m services.pod tune`, for `temper tune`: a search for faster kernels instead of an engine. `… pack-kernels
DESTINATION [sm90]`, for `temper kernels pack`: an archive of compiled kernels. One JSON object a line on standard
output, as of services.adapter_tools: progress, at the end the result or an error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import InvalidRequest, TemperError
from services.common.security.tls import Certificates
from services.common.shutdown import end_on_signals
from services.common.telemetry.logging import configure_logging
from services.common.telemetry.recent_logs import RecentLogs
from services.engine.executors.kernel_archive import pack
from services.engine.server.health import HealthServer, ProcessHealth
from services.engine.settings import EngineSettings
from services.pod.asleep import become, sleep
from services.pod.preflight import check_all, check_model_directory, check_tls, read_settings, use_kernel_cache
from services.trainer.settings import TrainerSettings

_BEAT_SECONDS = 1.0

log = structlog.get_logger(__name__)


async def _run(
    settings: EngineSettings,
    trainer: TrainerSettings,
    health: ProcessHealth,
    certificates: Certificates | None,
    recent: RecentLogs,
) -> bool:
    """Runs the pod to its end. True: somebody has put it to sleep."""
    # Imported after the checks: torch takes seconds, and longer if garbage is looked for among the modules.
    gc.disable()
    from services.pod.serve import Leave, serve, stop_on_signals

    gc.enable()
    loaded = None
    while True:
        stop, leave = asyncio.Event(), Leave()
        stop_on_signals(stop, health, leave)
        loaded = await serve(settings, trainer, stop, health, certificates, recent, leave, loaded)
        if leave.level is None or leave.level == "process":
            return leave.level is not None
        level, sleeping = leave.level, loaded.sleeping
        gc.unfreeze()  # what served is in circles, and has memory of the device
        gc.collect()
        try:
            await _beside(health, asyncio.to_thread(sleeping.give_back, level))
        except MemoryError as error:
            log.warning("no room on the host for the weights: the process is replaced instead", error=str(error))
            return leave.level is not None
        if leave.level is None:  # asked to stop meanwhile
            return False
        if not await sleep(settings, health, certificates, level, sleeping.take_back):
            return False


async def _beside(health: ProcessHealth, work: Coroutine[Any, Any, None]) -> None:
    """Waits for work, however long it takes, with signs of life of the event loop."""
    task = asyncio.create_task(work)
    while not task.done():
        health.beat()
        await asyncio.wait({task}, timeout=_BEAT_SECONDS)
    await task


def _emit(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def pack_kernels(destination: str, card: str = "") -> int:
    """Packs the compiled kernels of this machine. Returns the exit status, 1 with an error event.

    Args:
        card: class of cards, "sm90"; empty: the only one whose kernels are here.
    """
    try:
        settings, _ = read_settings()
        cache = use_kernel_cache(settings)
        if card and not re.fullmatch(r"sm[0-9]{2,3}", card):
            raise InvalidRequest(
                f"{card!r} is no class of cards: sm and its compute capability, e.g. sm90", param="card"
            )
        path, manifest = pack(cache, Path(destination), int(card[2:]) if card else None)
    except TemperError as error:
        _emit("error", message=error.message, code=error.code)
        return 1
    except OSError as error:
        _emit("error", message=f"{destination} cannot be written: {error.strerror}", code="invalid_request")
        return 1
    size = path.stat().st_size
    _emit("result", file=str(path), arch=manifest.arch, triton=manifest.triton, kernels=manifest.kernels, bytes=size)
    return 0


def tune() -> int:
    """Tunes the kernels to this machine's GPU. Returns the exit status, 1 with an error event."""
    try:
        settings, trainer = read_settings()
        configure_logging(settings, trainer, service="tune")
        end_on_signals()
        use_kernel_cache(settings)
        check_model_directory(settings)
        _emit("progress", stage="loading the model", done=0, total=0)
        # Imported after the checks: torch takes seconds.
        from services.pod.engine import tune_engine

        def told(seconds: float, found: str) -> None:
            _emit("progress", stage=found or "measuring", done=round(seconds, 1), total=settings.tune_seconds)

        outcome, path = tune_engine(settings, told)
    except TemperError as error:
        _emit("error", message=error.message, code=error.code)
        return 1
    bands = [
        {"rows": band.rows, "microseconds": round(1e6 * band.seconds, 1), "gain": round(band.gain, 4)}
        for band in outcome.bands
        if band.seconds
    ]
    kept = None if path is None else str(path)
    _emit("result", bands=bands, seconds=round(outcome.seconds, 1), candidates=outcome.trials, file=kept)
    return 0


def main() -> int:
    """Runs the pod. Returns the exit status: 0 after a drain, 1 with one line on stderr if it cannot start or
    continue."""
    probes: HealthServer | None = None
    try:
        settings, trainer = read_settings()
        recent = configure_logging(settings, trainer, service="engine")
        end_on_signals()
        health = ProcessHealth(settings.watchdog_seconds)
        if settings.health_port:
            probes = HealthServer(health, settings.grpc_host, settings.health_port)
            probes.start()
        use_kernel_cache(settings)
        certificates = check_tls(settings)
        check_all(settings)
        asleep = asyncio.run(_run(settings, trainer, health, certificates, recent))
    except TemperError as error:
        sys.stderr.write(f"temper engine: {error.message}\n")
        return 1
    finally:
        if probes is not None:
            probes.stop()
    if asleep:
        become("services.pod.asleep")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["pack-kernels"]:
        raise SystemExit(pack_kernels(*sys.argv[2:]))
    raise SystemExit(tune() if sys.argv[1:] == ["tune"] else main())
