"""Adapters of a simulated fleet: the store with its link, and what one engine has in its slots.

Which version gets a slot is decided by the engine's own slot table. Downloads share the store's link; the rest of a
load takes the time that was measured.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from benchmarks.fleet.subject import ADAPTER_LOAD_SECONDS, EVENT_SECONDS, Subject
from services.common.adapters.names import AdapterVersion
from services.engine.adapters.slot_table import SlotTable
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin

_WAIT_SECONDS = 30.0
"""TEMPER_ADAPTER_WAIT_SECONDS: half of it is shared by the slots as the time for which a version may drain."""


class SharedLink:
    """A link whose transfers share its bandwidth evenly, none faster than its own end.

    Args:
        total: bytes a second of all.
        each: bytes a second of one.
    """

    def __init__(self, total: float, each: float) -> None:
        self._total = total
        self._each = each
        self._loop = asyncio.get_running_loop()
        self._served = 0.0
        """Bytes that each transfer has got which was there all the time."""
        self._at = self._loop.time()
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        """Values of ``_served`` at which transfers end."""
        self._timer: asyncio.TimerHandle | None = None

    def transfer(self, size: float, done: Callable[[], None]) -> None:
        """Calls ``done`` once so many bytes have passed."""
        self._advance()
        self._waiting.append((self._served + size, done))
        self._plan()

    def _rate(self) -> float:
        return min(self._each, self._total / max(1, len(self._waiting)))

    def _advance(self) -> None:
        now = self._loop.time()
        self._served += (now - self._at) * self._rate()
        self._at = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            first = min(end for end, _ in self._waiting)
            self._timer = self._loop.call_later(max(0.0, first - self._served) / self._rate(), self._end, first)

    def _end(self, first: float) -> None:
        self._advance()
        self._served = max(self._served, first)  # what floats have lost
        ended = [done for end, done in self._waiting if end <= self._served]
        self._waiting = [one for one in self._waiting if one[0] > self._served]
        self._plan()
        for done in ended:
            done()


class AdapterStore:
    """The object store: current versions by name, and who is told of new ones."""

    def __init__(self, subject: Subject, names: Collection[str]) -> None:
        self.link = SharedLink(subject.store_link, subject.engine_link)
        self.size = subject.adapter_bytes
        self.current = dict.fromkeys(names, 1)
        self.listeners: list[Callable[[str], None]] = []

    def publish(self, name: str) -> AdapterVersion:
        """A new version of a name; engines hear of it a moment later."""
        self.current[name] += 1
        loop = asyncio.get_running_loop()
        for listener in self.listeners:
            loop.call_later(EVENT_SECONDS, listener, name)
        return AdapterVersion(name, self.current[name])


class EngineAdapters:
    """Adapters of one engine: pins, loads one after the other, and flips between two steps.

    Args:
        boundary: calls a function between two steps.
        retry: called when requests that wait for an adapter may get it.
    """

    def __init__(
        self,
        store: AdapterStore,
        slots: int,
        boundary: Callable[[Callable[[], None]], None],
        retry: Callable[[], None],
    ) -> None:
        self._store = store
        self._boundary = boundary
        self._retry = retry
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._table = SlotTable(slots, drain_seconds=_WAIT_SECONDS / (2 * slots), turn_seconds=1.0, clock=loop.time)
        self._meaning: dict[str, AdapterVersion] = {}
        """Versions that the names in use mean here."""
        self._jobs: deque[tuple[AdapterChoice, AdapterVersion]] = deque()
        self._busy = False
        self._loading: AdapterChoice | None = None
        self.flipped: dict[AdapterVersion, float] = {}
        """Times at which names began to mean a version here."""
        self.loads = 0
        store.listeners.append(self._published)

    def preload(self, name: str) -> None:
        """Puts the current version of a name into a slot before anything begins."""
        version = AdapterVersion(name, self._store.current[name])
        slot = self._table.take(AdapterChoice(name=name), version, ())
        if slot is None:
            raise ValueError(f"there is no slot for {version}")
        self._table.put(version, f"digest of {version}", slot)
        self._meaning[name] = version

    def close(self) -> None:
        """The engine is gone."""
        self._store.listeners.remove(self._published)
        self._jobs.clear()
        self._boundary = lambda _call: None

    def has(self, name: str) -> bool:
        """Whether a version of a name is in a slot, and requests for the name get it."""
        version = self._meaning.get(name)
        return version is not None and self._table.get(version) is not None

    @property
    def loaded(self) -> list[str]:
        """Versions in slots, as an engine's status has them."""
        return [str(version) for version, _ in self._table.published]

    @property
    def waiting(self) -> list[str]:
        """Adapters that are loaded, or are to be, as an engine's status has them."""
        loading = () if self._loading is None else (self._loading,)
        return [str(choice) for choice in (*loading, *(choice for choice, _ in self._jobs))]

    def pin(self, choice: AdapterChoice) -> AdapterPin | None:
        """The version that answers a request; None: it is loaded first."""
        if choice.name is None:
            return BASE_PIN
        version = self._meaning.get(choice.name) or AdapterVersion(choice.name, self._store.current[choice.name])
        resident = self._table.get(version)
        if resident is not None and self._table.takes_requests(resident, ()):
            self._meaning[choice.name] = version
            return self._table.acquire(resident)
        self._want(choice, version)
        return None

    def release(self, pin: AdapterPin) -> None:
        """Ends a request's pin."""
        if self._table.release(pin):
            self._work()
            self._retry()

    def _published(self, name: str) -> None:
        if name in self._meaning:
            self._want(AdapterChoice(name=name), AdapterVersion(name, self._store.current[name]))

    def _want(self, choice: AdapterChoice, version: AdapterVersion) -> None:
        if (choice, version) not in self._jobs:
            self._jobs.append((choice, version))
            self._work()

    def _work(self) -> None:
        """Begins the next load that gets a slot. One at a time: an engine has one thread for that."""
        if self._busy:
            return
        for job in tuple(self._jobs):
            choice, version = job
            resident = self._table.get(version)
            if resident is not None:
                self._table.leave(choice)
                if self._table.takes_requests(resident, ()):
                    self._jobs.remove(job)
                    self._loop.call_soon(self._retry)
                continue  # or it gives way to others that wait for a slot
            slot = self._table.take(choice, version, ())
            if slot is not None:
                self._jobs.remove(job)
                self._busy, self._loading = True, choice
                self._store.link.transfer(self._store.size, partial(self._downloaded, version, slot))
                return

    def _downloaded(self, version: AdapterVersion, slot: int) -> None:
        self._loop.call_later(ADAPTER_LOAD_SECONDS, self._loaded, version, slot)

    def _loaded(self, version: AdapterVersion, slot: int) -> None:
        self._table.put(version, f"digest of {version}", slot)
        self.loads += 1
        self._boundary(lambda: self._flip(version))

    def _flip(self, version: AdapterVersion) -> None:
        before = self._meaning.get(version.name)
        if before is None or before.version < version.version:
            self._meaning[version.name] = version
            self.flipped[version] = self._loop.time()
            if before is not None and self._table.get(before) is not None:
                self._table.forget(before)
        self._busy, self._loading = False, None
        self._work()
        self._retry()
