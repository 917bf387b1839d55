"""Slot table: the adapter version in each slot, the number of its pins, and the queue for slots. No torch, no I/O.

Slots are given first come, first served. While more versions wait than there are slots without pins, the least recently
requested of the other versions drain: they take no new requests until theirs are done. So a slot becomes free whatever
arrives, and no version keeps one for ever. Not thread-safe: AdapterManager holds its lock around every call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.common.adapters.composition import Published
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin, PrivateVersion


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Configuration of the adapter manager, from the engine's settings."""

    num_slots: int
    poll_seconds: float
    wait_seconds: float
    """Longest wait of a request, or of a job's policy, for a slot."""
    turn_seconds: float = 1.0
    """Least time for which a version takes new requests once it has a slot."""


Version = Published | PrivateVersion
"""Version that can be in a slot. A composition is one: the ranks of its members lie side by side."""
Claim = AdapterChoice | PrivateVersion
"""Claim on a slot: that of all requests with a choice, or of a job with its policy."""


@dataclass(slots=True)
class Resident:
    """Resident version: its weights are in a slot."""

    version: Version
    pin: AdapterPin
    loaded_at: float
    requests: int = 0
    last_used: int = 0
    forgotten: bool = False
    """True if the version cannot be requested any more; the slot is free once the last request ends."""
    draining_since: float | None = None
    """Begin of draining: it takes no new requests because others wait for its slot; None: it takes them."""


class SlotTable:
    """Slot table of slots 1 to ``num_slots``; slot 0 is the base and not counted.

    Args:
        drain_seconds: time for which a version may drain before another one drains as well.
        turn_seconds: least time for which a version takes new requests once it has a slot, so that loading it pays.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        drain_seconds: float,
        turn_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_slots = num_slots
        self._drain_seconds = drain_seconds
        self._turn_seconds = turn_seconds
        self._now = clock
        self._free = list(range(num_slots, 0, -1))
        self._by_slot: dict[int, Resident] = {}
        self._by_version: dict[Version, Resident] = {}
        self._queue: dict[Claim, Version] = {}
        """Waiting claims and the version that each wants in a slot, oldest first."""
        self._clock = 0

    def get(self, version: Version) -> Resident | None:
        return self._by_version.get(version)

    @property
    def published(self) -> Iterable[tuple[Published, Resident]]:
        """Every version, and composition of versions, that can be requested, in slot order."""
        residents = [self._by_slot[slot] for slot in sorted(self._by_slot)]
        return [(r.version, r) for r in residents if not isinstance(r.version, PrivateVersion) and not r.forgotten]

    @property
    def queue(self) -> Collection[Claim]:
        """Waiting claims, oldest first."""
        return self._queue.keys()

    def take(self, claim: Claim, version: Version, keep: Collection[Published]) -> int | None:
        """Takes a slot to load into, unless older claims need all of them: a free one, else that of the least recently
        used version without requests. Without one, the claim waits until `take`, `leave` or `retain`.

        Args:
            keep: versions that stay although no request is pinned to them. A private version always does,
                because it cannot be loaded again.

        Returns:
            The slot, owned by the caller until `put` or `give_back`; None if there is none yet.
        """
        self._queue[claim] = version
        idle, _ = self._evictable(keep)
        if self._waiting_versions().index(version) >= len(self._free) + len(idle):
            return None
        self._queue = {other: wanted for other, wanted in self._queue.items() if wanted != version}
        if self._free:
            return self._free.pop()
        victim = idle[0]
        del self._by_slot[victim.pin.slot]
        del self._by_version[victim.version]
        return victim.pin.slot

    def leave(self, claim: Claim) -> None:
        """Removes a claim from the queue, if it waits."""
        self._queue.pop(claim, None)

    def retain(self, claims: Collection[Claim]) -> None:
        """Removes all claims from the queue but these and those of jobs."""
        kept = {
            one: version for one, version in self._queue.items() if one in claims or isinstance(one, PrivateVersion)
        }
        self._queue = kept

    def takes_requests(self, resident: Resident, keep: Collection[Published]) -> bool:
        """True if a version takes new requests, i.e. it does not drain for a waiting claim."""
        return not self._queue or resident.pin.slot not in self._draining(keep)

    def _waiting_versions(self) -> list[Version]:
        return list(dict.fromkeys(self._queue.values()))

    def _evictable(self, keep: Collection[Published]) -> tuple[list[Resident], list[Resident]]:
        """Versions that may lose their slot, the least recently used first: those without requests, and those with
        some."""
        idle: list[Resident] = []
        busy: list[Resident] = []
        for resident in sorted(self._by_slot.values(), key=lambda resident: resident.last_used):
            if resident.version not in keep and not isinstance(resident.version, PrivateVersion):
                if resident.requests == 0:
                    idle.append(resident)
                elif not resident.forgotten:
                    busy.append(resident)
        return idle, busy

    def _draining(self, keep: Collection[Published]) -> set[int]:
        """Slots whose versions take no new requests. It chooses as many as there are waiting versions, at most half of
        all slots so that the steps stay full, and further ones beside those that have drained for too long."""
        now = self._now()
        idle, busy = self._evictable(keep)
        short_of = len(self._waiting_versions()) - len(self._free)
        needed = min(max(0, short_of - len(idle)), max(1, self._num_slots // 2))
        chosen = [resident for resident in busy if resident.draining_since is not None]
        hopeful = [one for one in chosen if needed and now - (one.draining_since or 0.0) < self._drain_seconds]
        hopeful.sort(key=lambda resident: resident.draining_since or 0.0)
        for resident in hopeful[needed:] if needed else chosen:
            resident.draining_since = None
        for resident in busy:
            if len(hopeful) >= needed:
                break
            if resident.draining_since is None and now - resident.loaded_at >= self._turn_seconds:
                resident.draining_since = now
                hopeful.append(resident)
        reserved = [resident.pin.slot for resident in idle[: max(0, short_of)]]
        return {*reserved, *(resident.pin.slot for resident in busy if resident.draining_since is not None)}

    def give_back(self, slot: int) -> None:
        """Returns a slot that was taken, but not filled."""
        self._free.append(slot)

    def put(self, version: Version, digest: str, slot: int) -> Resident:
        """Records that a taken slot now holds a version."""
        resident = Resident(version, AdapterPin(str(version), digest, slot), self._now())
        self._by_slot[slot] = resident
        self._by_version[version] = resident
        self._touch(resident)
        return resident

    def forget(self, version: Version) -> None:
        """Removes a version that was deleted or replaced; requests that are pinned to it still end with it."""
        resident = self._by_version.pop(version)
        resident.forgotten = True
        self._free_if_done(resident)

    def acquire(self, resident: Resident) -> AdapterPin:
        """Pins one request."""
        resident.requests += 1
        resident.draining_since = None
        self._touch(resident)
        return resident.pin

    def release(self, pin: AdapterPin) -> bool:
        """Ends the pin of one request.

        Returns:
            True if the version has no requests left, so that its slot can be taken.

        Raises:
            ValueError: there is no such pin.
        """
        if pin == BASE_PIN:
            return False
        resident = self._by_slot.get(pin.slot)
        if resident is None or resident.pin != pin or resident.requests == 0:
            raise ValueError(f"{pin!r} is not pinned")
        resident.requests -= 1
        self._free_if_done(resident)
        return resident.requests == 0

    def _free_if_done(self, resident: Resident) -> None:
        if resident.forgotten and resident.requests == 0:
            del self._by_slot[resident.pin.slot]
            self._free.append(resident.pin.slot)

    def _touch(self, resident: Resident) -> None:
        self._clock += 1
        resident.last_used = self._clock
