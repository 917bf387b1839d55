"""Whom to evict first: GreedyDual-Size-Frequency.

worth = clock + uses · seconds / bytes, and the clock is the worth of what was evicted last: what nobody uses falls
behind, however dear it once was (Cherkasova, Improving WWW proxies performance with greedy-dual-size-frequency caching
policy, HP Labs 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_SLACK = 64
"""A heap is made anew when it has so many outdated entries and they are half of it."""


class _Item(Generic[K]):
    __slots__ = ("entry", "held", "key", "pinned_until", "queued", "rate", "uses", "worth")

    def __init__(self, key: K, rate: float, uses: int, clock: float) -> None:
        self.key = key
        self.rate = rate
        """Seconds a byte."""
        self.uses = uses
        self.worth = clock + uses * rate
        self.pinned_until = 0.0
        self.held = False
        self.entry: int | None = None
        """The number of its one valid entry in a queue; None: it has none."""
        self.queued = 0.0
        """The worth in that entry, at most ``worth``."""


class _Queue(Generic[K]):
    """A heap by worth. An item's worth may rise unnoticed; when it comes up, it is put where it belongs."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._heap: list[tuple[float, int, _Item[K]]] = []
        self._numbers = numbers
        self._outdated = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, item: _Item[K]) -> None:
        if item.entry is not None and item.queued <= item.worth:
            return
        self.take_out(item)
        item.entry, item.queued = next(self._numbers), item.worth
        heappush(self._heap, (item.worth, item.entry, item))

    def take_out(self, item: _Item[K]) -> None:
        if item.entry is None:
            return
        item.entry = None
        self._outdated += 1
        if self._outdated > max(_SLACK, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapify(self._heap)
            self._outdated = 0

    def take_least(self) -> _Item[K] | None:
        """The item of the least worth, no longer in the queue; None: the queue is empty."""
        while self._heap:
            worth, entry, item = heappop(self._heap)
            if item.entry != entry:
                self._outdated -= 1
                continue
            item.entry = None
            if item.worth > worth:
                self.put(item)
                continue
            return item
        return None


class Worth(Generic[K]):
    """Things that may be evicted, O(log n) a call. Not thread-safe.

    What is pinned goes only when nothing else is left; what is held does not go at all. Either keeps its uses.
    """

    def __init__(self) -> None:
        self._items: dict[K, _Item[K]] = {}
        self._numbers = count()
        self._common: _Queue[K] = _Queue(self._numbers)
        self._pinned: _Queue[K] = _Queue(self._numbers)
        self._ends: list[tuple[float, int, K]] = []
        """Of pins."""
        self._in_pinned: set[K] = set()
        self.clock = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def worth(self, key: K) -> float:
        """Raises KeyError if it is not there."""
        return self._items[key].worth

    def uses(self, key: K) -> int:
        """Raises KeyError if it is not there."""
        return self._items[key].uses

    def pinned(self, key: K, now: float) -> bool:
        """Raises KeyError if it is not there."""
        return self._items[key].pinned_until > now

    def add(self, key: K, seconds: float, size: int, *, uses: int = 1) -> None:
        """Something that takes ``seconds`` to make again and ``size`` bytes of room."""
        self.remove(key)
        item = self._items[key] = _Item(key, seconds / max(1, size), uses, self.clock)
        self._common.put(item)

    def update(self, key: K, seconds: float, size: int) -> None:
        """It has another price or size now, as if it had been used last when it really was."""
        item = self._items[key]
        rate = seconds / max(1, size)
        self._move(item, item.worth + item.uses * (rate - item.rate))
        item.rate = rate

    def touch(self, key: K, uses: int = 1) -> None:
        """It was used."""
        item = self._items[key]
        item.uses += uses
        self._move(item, self.clock + item.uses * item.rate)

    def pin(self, key: K, until: float) -> None:
        """It goes only when nothing else is left, until a time on the clock that pop_least gets; 0: no longer."""
        item = self._items[key]
        item.pinned_until = until
        if until:
            heappush(self._ends, (until, next(self._numbers), key))
            if len(self._ends) > _SLACK + 4 * len(self._items):
                pins = [(each.pinned_until, key) for key, each in self._items.items() if each.pinned_until]
                self._ends = [(end, next(self._numbers), key) for end, key in pins]
                heapify(self._ends)
        self._place(item, bool(until))

    def hold(self, key: K, held: bool) -> None:
        """Whether it has to stay for now."""
        item = self._items[key]
        item.held = held
        queue = self._queue(item)
        if held:
            queue.take_out(item)
        else:
            queue.put(item)

    def pop_least(self, now: float, may_go: Callable[[K], bool] | None = None) -> K | None:
        """Removes the one of the least worth and sets the clock; None: there is none.

        Args:
            now: pins that end before are over.
            may_go: whether this one can be evicted. It is asked in the order of worth, until it says yes.
        """
        while self._ends and self._ends[0][0] <= now:
            key = heappop(self._ends)[2]
            item = self._items.get(key)
            if item is not None and item.pinned_until <= now:
                self._place(item, False)
        for queue in (self._common, self._pinned):
            passed: list[_Item[K]] = []
            found = queue.take_least()
            while found is not None and may_go is not None and not may_go(found.key):
                passed.append(found)
                found = queue.take_least()
            for item in passed:
                queue.put(item)
            if found is not None:
                del self._items[found.key]
                self._in_pinned.discard(found.key)
                self.clock = max(self.clock, found.worth)
                return found.key
        return None

    def remove(self, key: K) -> None:
        """It is gone for another reason; none there is fine."""
        item = self._items.pop(key, None)
        if item is not None:
            self._queue(item).take_out(item)
            self._in_pinned.discard(key)

    def _queue(self, item: _Item[K]) -> _Queue[K]:
        return self._pinned if item.key in self._in_pinned else self._common

    def _place(self, item: _Item[K], pinned: bool) -> None:
        """Brings it to the queue that it belongs to."""
        if (item.key in self._in_pinned) == pinned:
            return
        self._queue(item).take_out(item)
        if pinned:
            self._in_pinned.add(item.key)
        else:
            self._in_pinned.discard(item.key)
        if not item.held:
            self._queue(item).put(item)

    def _move(self, item: _Item[K], worth: float) -> None:
        item.worth = worth
        if not item.held:
            self._queue(item).put(item)
