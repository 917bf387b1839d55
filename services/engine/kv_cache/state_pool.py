"""State pool: the state slots of sequences and snapshots. Slot 0 is scratch and never handed out."""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.kv_cache.block_pool import IntegrityError


class StatePool:
    """State slots. Each taken slot belongs to exactly one live sequence or one prefix snapshot.

    Args:
        num_slots: slots in the state buffers, scratch slot 0 included.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is scratch), got {num_slots}")
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def total(self) -> int:
        """Number of usable slots."""
        return self._num_slots - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Hands out a free slot; None: there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Returns a slot to the pool; raises IntegrityError if it is not taken."""
        if slot not in self._taken:
            raise IntegrityError(f"slot {slot} is released but not taken")
        self._taken.remove(slot)
        self._free.append(slot)

    def check(self, held: Iterable[int]) -> None:
        """Compares the taken slots with those that the holders say they have.

        Raises:
            IntegrityError: a slot is leaked, lost or shared.
        """
        owners = list(held)
        if len(set(owners)) != len(owners):
            raise IntegrityError("a state slot has two owners")
        if set(owners) != self._taken:
            raise IntegrityError(f"slots {sorted(set(owners) ^ self._taken)[:8]} are leaked or lost")
        if sorted([*owners, *self._free]) != list(range(1, self._num_slots)):
            raise IntegrityError("free and taken slots do not add up")
