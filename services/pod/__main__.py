"""`python -m services.pod`: engine and trainer of one device, configured by TEMPER_* (services/engine/settings.py)."""

from __future__ import annotations

import asyncio
import sys

from services.common.errors import TemperError
from services.common.security.tls import Certificates
from services.common.shutdown import end_on_signals
from services.common.telemetry.logging import configure_logging
from services.engine.server.health import HealthServer, ProcessHealth
from services.engine.settings import EngineSettings
from services.pod.preflight import check_all, check_tls, read_settings, use_kernel_cache
from services.trainer.settings import TrainerSettings


async def _run(
    settings: EngineSettings, trainer: TrainerSettings, health: ProcessHealth, certificates: Certificates | None
) -> None:
    # Imported after the checks: torch takes seconds.
    from services.pod.serve import serve, stop_on_signals

    stop = asyncio.Event()
    stop_on_signals(stop, health)
    await serve(settings, trainer, stop, health, certificates)


def main() -> int:
    """Runs the pod. Returns the exit status: 0 after a drain, 1 with one line on stderr if it cannot start or
    continue."""
    probes: HealthServer | None = None
    try:
        settings, trainer = read_settings()
        configure_logging(settings, service="engine")
        end_on_signals()
        health = ProcessHealth(settings.watchdog_seconds)
        if settings.health_port:
            probes = HealthServer(health, settings.grpc_host, settings.health_port)
            probes.start()
        use_kernel_cache(settings)
        certificates = check_tls(settings)
        check_all(settings)
        asyncio.run(_run(settings, trainer, health, certificates))
    except TemperError as error:
        sys.stderr.write(f"temper engine: {error.message}\n")
        return 1
    finally:
        if probes is not None:
            probes.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
