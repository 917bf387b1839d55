"""Work of a service that is done again and again, and goes on by itself when a store that was away is back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from structlog.typing import FilteringBoundLogger

from services.common.errors import TemperError


async def repeat(
    once: Callable[[], Awaitable[object]], seconds: float, log: FilteringBoundLogger, name: str
) -> NoReturn:
    """Calls ``once``, with a pause of so many seconds behind it, until it is cancelled. An error of ours is told at its
    first time in a row, as "{name}.away", and any other as "{name}.failed": a bug must not end the work for good."""
    away = False
    while True:
        try:
            await once()
            away = False
        except TemperError as error:
            if not away:
                log.warning(f"{name}.away", error=error.message)
            away = True
        except Exception:
            log.exception(f"{name}.failed")
        await asyncio.sleep(seconds)
