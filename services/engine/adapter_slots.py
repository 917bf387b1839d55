"""Which adapter version is in which LoRA slot, and how many requests are pinned to it. No torch, no I/O.

Not thread-safe: AdapterManager holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.common.names import AdapterVersion
from services.engine.private_versions import PrivateVersion
from services.engine.request import BASE_PIN, AdapterPin

Version = AdapterVersion | PrivateVersion
"""What can be in a slot."""


@dataclass(slots=True)
class Resident:
    """A version whose weights are in a slot."""

    version: Version
    pin: AdapterPin
    requests: int = 0
    last_used: int = 0
    forgotten: bool = False
    """Its version may not be found any more; the slot is free once the last request ends."""


class SlotTable:
    """Slots 1 to ``num_slots``; slot 0 is the base and not counted."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots, 0, -1))
        self._by_slot: dict[int, Resident] = {}
        self._by_version: dict[Version, Resident] = {}
        self._clock = 0

    def get(self, version: Version) -> Resident | None:
        return self._by_version.get(version)

    @property
    def published(self) -> Iterable[tuple[AdapterVersion, Resident]]:
        """Every version of the store that can be found, in slot order."""
        residents = [self._by_slot[slot] for slot in sorted(self._by_slot)]
        return [(r.version, r) for r in residents if isinstance(r.version, AdapterVersion) and not r.forgotten]

    def take(self, keep: Collection[AdapterVersion]) -> int | None:
        """A slot to load into: a free one, else that of the least recently used version without requests.

        Args:
            keep: versions that stay although no request is pinned to them. A private version always does: there is
                nothing to load it from again.

        Returns:
            The slot, owned by the caller until `put` or `give_back`; None if every version is in use.
        """
        if self._free:
            return self._free.pop()
        idle = [
            r
            for r in self._by_slot.values()
            if r.requests == 0 and r.version not in keep and not isinstance(r.version, PrivateVersion)
        ]
        if not idle:
            return None
        victim = min(idle, key=lambda resident: resident.last_used)
        del self._by_slot[victim.pin.slot]
        del self._by_version[victim.version]
        return victim.pin.slot

    def give_back(self, slot: int) -> None:
        """Returns a slot that was taken and not filled."""
        self._free.append(slot)

    def put(self, version: Version, digest: str, slot: int) -> Resident:
        """Records that a taken slot now holds a version."""
        resident = Resident(version, AdapterPin(str(version), digest, slot))
        self._by_slot[slot] = resident
        self._by_version[version] = resident
        self._touch(resident)
        return resident

    def forget(self, version: Version) -> None:
        """Makes a version unfindable (deleted, replaced); requests that are pinned to it still end with it."""
        resident = self._by_version.pop(version)
        resident.forgotten = True
        self._free_if_done(resident)

    def acquire(self, resident: Resident) -> AdapterPin:
        """Pins one request."""
        resident.requests += 1
        self._touch(resident)
        return resident.pin

    def release(self, pin: AdapterPin) -> bool:
        """Ends the pin of one request.

        Returns:
            True if that left a version without requests, so that its slot can be taken.

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
