"""Placement of published versions into adapter slots: loads a requested version, or queues it for a slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

import structlog

from services.common.adapters.composition import Published
from services.common.errors import AdapterRejected, NotFound, Unavailable
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.slot_table import SlotTable
from services.engine.observability.events import AdapterLoadFailed, EventStream, LoadFailure
from services.engine.requests.adapter import AdapterChoice

_REMEMBERED = 1024
"""Most refused versions that are remembered."""

log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class NoFreeSlot(Exception):
    """No slot is free: the version waits for one; try again when a request ends."""


class Placement:
    """Loads versions into slots, on the I/O thread.

    Args:
        changed: guards ``table``.
        keep: returns versions that stay although no request is pinned to them; called with the lock held.
    """

    def __init__(
        self,
        changed: threading.Condition,
        table: SlotTable,
        loader: AdapterLoader,
        keep: Callable[[], Collection[Published]],
        events: EventStream,
    ) -> None:
        self._changed = changed
        self._table = table
        self._loader = loader
        self._keep = keep
        self._events = events
        self._rejected: dict[Published, AdapterRejected] = {}

    def ensure_loaded(self, claim: AdapterChoice, version: Published) -> bool:
        """Loads a version into a slot unless it is in one.

        Args:
            claim: choice that asks for it and waits if there is no slot.

        Returns:
            Whether it had to be loaded.

        Raises:
            NoFreeSlot: it waits for a slot.
            AdapterRejected: it does not bind; it is not tried again.
            ModelNotFound: there is no such version.
            Unavailable: the object store does not answer.
        """
        with self._changed:
            if self._table.get(version) is not None:
                self._table.leave(claim)
                return False
            waits = claim in self._table.queue
        if version in self._rejected:
            raise self._rejected[version]
        if not waits:
            self._try(
                version, lambda: self._loader.check(version)
            )  # nothing gives way to a version that does not exist
        with self._changed:
            slot = self._table.take(claim, version, self._keep())
        if slot is None:
            raise NoFreeSlot
        started = time.monotonic()
        try:
            digest = self._try(version, lambda: self._loader.load(version, slot))
        except BaseException:
            with self._changed:
                self._table.give_back(slot)
            raise
        with self._changed:
            self._table.put(version, digest, slot)
        log.info("adapter loaded", version=str(version), slot=slot, seconds=round(time.monotonic() - started, 3))
        return True

    def _try(self, version: Published, call: Callable[[], _T]) -> _T:
        """Runs a part of a load; a failure is counted, and a permanent one is remembered."""
        try:
            return call()
        except BaseException as error:
            self._events.emit(AdapterLoadFailed(_reason(error)))
            if isinstance(error, AdapterRejected):
                if len(self._rejected) >= _REMEMBERED:
                    self._rejected.clear()
                self._rejected[version] = error
            raise


def _reason(error: BaseException) -> LoadFailure:
    if isinstance(error, AdapterRejected):
        return "rejected"
    if isinstance(error, NotFound):
        return "missing"
    return "unavailable" if isinstance(error, Unavailable) else "error"
