"""Chores that a gateway does now and then: what nobody will need any more goes from the stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import structlog

from services.common.errors import TemperError
from services.common.shutdown import cancel_and_wait

_EVERY_SECONDS = 600.0

Chore: TypeAlias = Callable[[], Awaitable[int]]
"""Removes what is left over, and returns how many things that were. May raise Unavailable."""

log = structlog.get_logger("tidying")


class Tidying:
    """Chores by name, done at intervals as long as the gateway runs. Several gateways may do the same ones."""

    def __init__(self, chores: Mapping[str, Chore]) -> None:
        self._chores = chores
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def once(self) -> dict[str, int]:
        """Does every chore; returns what those that went well have removed."""
        removed: dict[str, int] = {}
        for name, chore in self._chores.items():
            try:
                removed[name] = await chore()
            except TemperError as error:
                log.warning("untidy", chore=name, error=error.message)
            except Exception:  # a bug in one must not end the others for good
                log.exception("tidying.failed", chore=name)
            else:
                if removed[name]:
                    log.info("tidied", chore=name, removed=removed[name])
        return removed

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.once()
