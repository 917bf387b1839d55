"""Keeping the responses of connections: a convenience, so inference goes on without it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import structlog

from services.common.errors import PayloadTooLarge, Unavailable
from services.gateway.api.responses.store.record import Record
from services.gateway.api.responses.store.store import Place, ResponseStore

log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 5.0


class Shelf:
    """Stores responses as long as the store is there.

    Args:
        store: where they are kept.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._away_until = 0.0

    async def keep(self, place: Place, record: Record) -> None:
        """Stores a response and says in its `store` whether that was done. When the store does not answer, it is left
        alone for a while: clients do not wait for it one after the other."""
        response = record.response
        if response["store"]:
            response["store"] = await self.tried(place, lambda: self._store.save(place, record))

    async def tried(self, place: Place, save: Callable[[], Awaitable[bool]]) -> bool:
        """Whether something was stored, under the same rule."""
        if self._store.largest_of(place.owner) == 0 or time.monotonic() < self._away_until:
            return False
        try:
            return await save()
        except (Unavailable, PayloadTooLarge) as error:
            log.warning("a response is not stored", response=place.id, error=error.message)
            if isinstance(error, Unavailable):
                self._away_until = time.monotonic() + _PAUSE_SECONDS
            return False
