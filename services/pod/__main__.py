"""`python -m services.pod`: engine and trainer of one device, configured by TEMPER_* (services/engine/settings.py)."""

from __future__ import annotations

import asyncio
import sys

from services.common.errors import TemperError
from services.common.telemetry import configure_logging
from services.engine.settings import EngineSettings
from services.pod.preflight import check_all, read_settings, use_kernel_cache
from services.trainer.settings import TrainerSettings


async def _run(settings: EngineSettings, trainer: TrainerSettings) -> None:
    # Imported after the checks: torch takes seconds.
    from services.pod.serve import serve, stop_on_signals

    stop = asyncio.Event()
    stop_on_signals(stop)
    await serve(settings, trainer, stop)


def main() -> int:
    """Returns the exit status: 0 after a drain, 1 with one line on stderr when the pod cannot start or go on."""
    try:
        settings, trainer = read_settings()
        configure_logging(settings, service="engine")
        use_kernel_cache(settings)
        check_all(settings)
        asyncio.run(_run(settings, trainer))
    except TemperError as error:
        sys.stderr.write(f"temper engine: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
