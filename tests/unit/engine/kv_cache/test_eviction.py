"""Whom to evict first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.engine.kv_cache.eviction import EvictionQueue


def evicted(worth: EvictionQueue[str], now: float = 0.0) -> list[str]:
    keys = []
    while (key := worth.pop_least(now)) is not None:
        keys.append(key)
    return keys


def test_what_is_cheap_large_or_unused_goes_first() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    worth.add("dear", 4.0, 100)
    worth.add("cheap", 1.0, 100)
    worth.add("large", 4.0, 800)
    worth.add("used", 1.0, 100)
    worth.touch("used", 8)
    assert evicted(worth) == ["large", "cheap", "dear", "used"]


def test_what_was_dear_once_and_is_not_used_falls_behind() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    worth.add("old", 3.0, 1)
    order = []
    for number in range(5):
        worth.add(f"new{number}", 1.0, 1)
        worth.touch(f"new{number}")
        order.append(worth.pop_least(0.0))
    assert order == ["new0", "old", "new1", "new2", "new3"]
    assert worth.clock == 6.0


def test_pins_are_over_at_their_time_and_yield_when_nothing_else_is_left() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    for key, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)):
        worth.add(key, seconds, 1)
    worth.pin("a", 10.0)
    worth.pin("b", 20.0)
    assert worth.pinned("a", 9.9)
    assert not worth.pinned("a", 10.0)
    assert worth.pop_least(9.0) == "c"
    assert worth.pop_least(10.0) == "a"
    assert worth.pop_least(10.0) == "d"
    assert worth.pop_least(10.0) == "b"
    assert worth.pop_least(10.0) is None


def test_a_pin_can_be_made_longer_and_taken_away() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    for key, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        worth.add(key, seconds, 1)
        worth.pin(key, 5.0)
    worth.pin("a", 9.0)
    worth.pin("c", 0.0)
    assert worth.pop_least(1.0) == "c"
    assert worth.pop_least(6.0) == "b"
    assert worth.pop_least(6.0) == "a"


def test_held_ones_stay_and_may_go_is_asked_in_order() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    for key, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)):
        worth.add(key, seconds, 1)
    worth.hold("a", True)
    asked = []
    assert worth.pop_least(0.0, lambda key: asked.append(key) or key == "c") == "c"
    assert asked == ["b", "c"]
    worth.hold("a", False)
    assert evicted(worth) == ["a", "b", "d"]


def test_a_new_price_counts() -> None:
    worth: EvictionQueue[str] = EvictionQueue()
    worth.add("a", 1.0, 1)
    worth.add("b", 2.0, 1)
    worth.touch("a", 4)
    worth.update("a", 1.0, 10)
    assert worth.priority("a") == pytest.approx(0.5)
    assert evicted(worth) == ["a", "b"]


def test_heaps_do_not_grow_with_what_is_gone() -> None:
    worth: EvictionQueue[int] = EvictionQueue()
    for number in range(5000):
        worth.add(number, 1.0, 1)
        worth.pin(number, 1.0)
        worth.pin(number, 0.0)
        worth.remove(number)
    assert len(worth._common) + len(worth._pinned) + len(worth._ends) < 500


@dataclass
class _Plain:
    rate: float
    worth: float
    uses: int = 1
    until: float = 0.0
    held: bool = False


class WorthMachine(RuleBasedStateMachine):
    """Against the definition, computed anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.worth: EvictionQueue[int] = EvictionQueue()
        self.plain: dict[int, _Plain] = {}
        self.clock = 0.0
        self.now = 1.0

    @rule(key=st.integers(0, 9), seconds=st.integers(0, 20), size=st.integers(1, 4))
    def add(self, key: int, seconds: int, size: int) -> None:
        self.worth.add(key, seconds, size)
        self.plain[key] = _Plain(seconds / size, self.clock + seconds / size)

    @rule(key=st.integers(0, 9), uses=st.integers(1, 3))
    def touch(self, key: int, uses: int) -> None:
        if key in self.plain:
            self.worth.touch(key, uses)
            item = self.plain[key]
            item.uses += uses
            item.worth = self.clock + item.uses * item.rate

    @rule(key=st.integers(0, 9), seconds=st.integers(0, 20), size=st.integers(1, 4))
    def update(self, key: int, seconds: int, size: int) -> None:
        if key in self.plain:
            self.worth.update(key, seconds, size)
            item = self.plain[key]
            item.worth += item.uses * (seconds / size - item.rate)
            item.rate = seconds / size

    @rule(key=st.integers(0, 9), seconds=st.sampled_from([0.0, 0.5, 2.0, 9.0]))
    def pin(self, key: int, seconds: float) -> None:
        if key in self.plain:
            self.plain[key].until = self.now + seconds if seconds else 0.0
            self.worth.pin(key, self.plain[key].until)

    @rule(key=st.integers(0, 9), held=st.booleans())
    def hold(self, key: int, held: bool) -> None:
        if key in self.plain:
            self.worth.hold(key, held)
            self.plain[key].held = held

    @rule(key=st.integers(0, 9))
    def remove(self, key: int) -> None:
        self.worth.remove(key)
        self.plain.pop(key, None)

    @rule(barred=st.sets(st.integers(0, 9), max_size=4), later=st.sampled_from([0.0, 1.0, 5.0]))
    def pop(self, barred: set[int], later: float) -> None:
        self.now += later
        can = {key: item for key, item in self.plain.items() if not item.held and key not in barred}
        key = self.worth.pop_least(self.now, lambda key: key not in barred)
        if key is None:
            assert not can
            return
        item = can[key]
        ranks = [(other.until > self.now, other.worth) for other in can.values()]
        assert (item.until > self.now, item.worth) == min(ranks)
        self.clock = max(self.clock, item.worth)
        del self.plain[key]

    @invariant()
    def books_agree(self) -> None:
        assert len(self.worth) == len(self.plain)
        assert self.worth.clock == self.clock
        for key, item in self.plain.items():
            assert key in self.worth
            assert self.worth.priority(key) == item.worth
            assert self.worth.uses(key) == item.uses


TestWorthMachine = WorthMachine.TestCase
