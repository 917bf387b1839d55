"""Eviction order: GreedyDual-Size-Frequency.

priority = clock + uses · seconds / bytes; the clock is the priority of the last evicted entry. So an entry that nobody
uses falls behind, however expensive it once was (Cherkasova, Improving WWW proxies performance with
greedy-dual-size-frequency caching policy, HP Labs 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_SLACK = 64
"""A heap is rebuilt when it has so many outdated entries and they are half of it."""


class _Candidate(Generic[K]):
    __slots__ = ("entry", "held", "key", "pinned_until", "priority", "queued", "rate", "uses")

    def __init__(self, key: K, rate: float, uses: int, clock: float) -> None:
        self.key = key
        self.rate = rate
        """Seconds to make it again, for each byte."""
        self.uses = uses
        self.priority = clock + uses * rate
        self.pinned_until = 0.0
        self.held = False
        self.entry: int | None = None
        """Number of its one valid heap entry; None: it has none."""
        self.queued = 0.0
        """Priority in that heap entry, at most ``priority``."""


class _Queue(Generic[K]):
    """Heap by priority. A priority may rise without touching the heap; its entry is corrected when it comes up."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._heap: list[tuple[float, int, _Candidate[K]]] = []
        self._numbers = numbers
        self._outdated = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, candidate: _Candidate[K]) -> None:
        if candidate.entry is not None and candidate.queued <= candidate.priority:
            return
        self.take_out(candidate)
        candidate.entry, candidate.queued = next(self._numbers), candidate.priority
        heappush(self._heap, (candidate.priority, candidate.entry, candidate))

    def take_out(self, candidate: _Candidate[K]) -> None:
        if candidate.entry is None:
            return
        candidate.entry = None
        self._outdated += 1
        if self._outdated > max(_SLACK, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapify(self._heap)
            self._outdated = 0

    def take_least(self) -> _Candidate[K] | None:
        """Removes and returns the candidate of the lowest priority; None: the queue is empty."""
        while self._heap:
            priority, entry, candidate = heappop(self._heap)
            if candidate.entry != entry:
                self._outdated -= 1
                continue
            candidate.entry = None
            if candidate.priority > priority:
                self.put(candidate)
                continue
            return candidate
        return None


class EvictionQueue(Generic[K]):
    """Priority queue of cache entries that may be evicted, O(log n) a call. Not thread-safe.

    A pinned entry is evicted only when nothing else is left; a held one is not evicted at all. Both keep their count of
    uses.
    """

    def __init__(self) -> None:
        self._candidates: dict[K, _Candidate[K]] = {}
        self._numbers = count()
        self._common: _Queue[K] = _Queue(self._numbers)
        self._pinned: _Queue[K] = _Queue(self._numbers)
        self._ends: list[tuple[float, int, K]] = []
        """(end, number, key) of every pin, a heap by its end."""
        self._in_pinned: set[K] = set()
        self.clock = 0.0

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, key: object) -> bool:
        return key in self._candidates

    def priority(self, key: K) -> float:
        """Priority of an entry; raises KeyError if it is not there."""
        return self._candidates[key].priority

    def uses(self, key: K) -> int:
        """Number of uses of an entry; raises KeyError if it is not there."""
        return self._candidates[key].uses

    def pinned(self, key: K, now: float) -> bool:
        """True while an entry is pinned; raises KeyError if it is not there."""
        return self._candidates[key].pinned_until > now

    def add(self, key: K, seconds: float, size: int, *, uses: int = 1) -> None:
        """Adds an entry that takes ``seconds`` to make again and has ``size`` bytes."""
        self.remove(key)
        candidate = self._candidates[key] = _Candidate(key, seconds / max(1, size), uses, self.clock)
        self._common.put(candidate)

    def update(self, key: K, seconds: float, size: int) -> None:
        """Changes the cost or size of an entry; the time of its last use stays."""
        candidate = self._candidates[key]
        rate = seconds / max(1, size)
        self._move(candidate, candidate.priority + candidate.uses * (rate - candidate.rate))
        candidate.rate = rate

    def touch(self, key: K, uses: int = 1) -> None:
        """Counts uses of an entry."""
        candidate = self._candidates[key]
        candidate.uses += uses
        self._move(candidate, self.clock + candidate.uses * candidate.rate)

    def pin(self, key: K, until: float) -> None:
        """Pins an entry until ``until``, on the clock that pop_least gets; 0 unpins it. See the class."""
        candidate = self._candidates[key]
        candidate.pinned_until = until
        if until:
            heappush(self._ends, (until, next(self._numbers), key))
            if len(self._ends) > _SLACK + 4 * len(self._candidates):
                pins = [(each.pinned_until, key) for key, each in self._candidates.items() if each.pinned_until]
                self._ends = [(end, next(self._numbers), key) for end, key in pins]
                heapify(self._ends)
        self._place(candidate, bool(until))

    def hold(self, key: K, held: bool) -> None:
        """Holds an entry, which keeps it from eviction, or ends the hold."""
        candidate = self._candidates[key]
        candidate.held = held
        queue = self._queue(candidate)
        if held:
            queue.take_out(candidate)
        else:
            queue.put(candidate)

    def pop_least(self, now: float, may_go: Callable[[K], bool] | None = None) -> K | None:
        """Removes and returns the key of the lowest priority, and sets the clock; None: nothing can be evicted.

        Args:
            now: pins that end before this time are over.
            may_go: tells whether a key can be evicted; asked in the order of priority until it returns True.
        """
        while self._ends and self._ends[0][0] <= now:
            key = heappop(self._ends)[2]
            candidate = self._candidates.get(key)
            if candidate is not None and candidate.pinned_until <= now:
                self._place(candidate, False)
        for queue in (self._common, self._pinned):
            passed: list[_Candidate[K]] = []
            found = queue.take_least()
            while found is not None and may_go is not None and not may_go(found.key):
                passed.append(found)
                found = queue.take_least()
            for candidate in passed:
                queue.put(candidate)
            if found is not None:
                del self._candidates[found.key]
                self._in_pinned.discard(found.key)
                self.clock = max(self.clock, found.priority)
                return found.key
        return None

    def remove(self, key: K) -> None:
        """Removes an entry, if it is there."""
        candidate = self._candidates.pop(key, None)
        if candidate is not None:
            self._queue(candidate).take_out(candidate)
            self._in_pinned.discard(key)

    def _queue(self, candidate: _Candidate[K]) -> _Queue[K]:
        return self._pinned if candidate.key in self._in_pinned else self._common

    def _place(self, candidate: _Candidate[K], pinned: bool) -> None:
        """Moves a candidate to the pinned or to the common queue."""
        if (candidate.key in self._in_pinned) == pinned:
            return
        self._queue(candidate).take_out(candidate)
        if pinned:
            self._in_pinned.add(candidate.key)
        else:
            self._in_pinned.discard(candidate.key)
        if not candidate.held:
            self._queue(candidate).put(candidate)

    def _move(self, candidate: _Candidate[K], priority: float) -> None:
        candidate.priority = priority
        if not candidate.held:
            self._queue(candidate).put(candidate)
