"""Blocks, slots and the prefix tree on their own."""

from __future__ import annotations

import pytest

from services.engine.memory.blocks import BlockPool
from services.engine.memory.cost import ComputeCost
from services.engine.memory.integrity import IntegrityError
from services.engine.memory.prefix import PrefixCache, Sizes
from services.engine.memory.slots import SlotPool
from services.engine.memory.tiers.ports import space_of
from services.engine.memory.tokens import encode


def test_blocks_are_handed_out_once_and_never_scratch() -> None:
    pool = BlockPool(5)
    taken = pool.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert (pool.free, pool.used, pool.total) == (0, 4, 4)
    with pytest.raises(IntegrityError):
        pool.take(1)
    pool.release(taken[:2])
    assert pool.free == 2
    assert pool.take(0) == []
    pool.check(taken[2:], [])


def test_shared_blocks_live_as_long_as_anyone_holds_them() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.free == 1
    pool.cache(block)
    pool.release([block])
    assert (pool.free, pool.idle, pool.used) == (1, 1, 0)
    pool.share([block])
    assert (pool.idle, pool.used) == (0, 1)
    pool.uncache(block)
    pool.release([block])
    assert (pool.free, pool.idle) == (2, 0)


def test_misuse_of_blocks_is_found() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    with pytest.raises(IntegrityError):
        pool.share([block + 1])
    with pytest.raises(IntegrityError):
        pool.uncache(block)
    pool.cache(block)
    pool.release([block])
    with pytest.raises(IntegrityError):
        pool.release([block])
    for held, cached in (([block], [block]), ([], []), ([0], [block])):
        with pytest.raises(IntegrityError):
            pool.check(held, cached)
    pool.check([], [block])
    with pytest.raises(ValueError, match="scratch"):
        BlockPool(1)


def test_slots() -> None:
    pool = SlotPool(3)
    first, second = pool.take(), pool.take()
    assert {first, second} == {1, 2}
    assert pool.take() is None
    assert first is not None
    pool.release(first)
    with pytest.raises(IntegrityError):
        pool.release(first)
    pool.check([second])
    for held in ([], [second, second], [first, second]):
        with pytest.raises(IntegrityError):
            pool.check(held)
    with pytest.raises(ValueError, match="scratch"):
        SlotPool(1)


class Cache:
    """A prefix cache over blocks of two tokens, whose writers let go at once."""

    def __init__(self) -> None:
        self.blocks = BlockPool(20)
        self.slots = SlotPool(10)
        self.cache = PrefixCache(self.blocks, self.slots, 2, Sizes(), ComputeCost(1.0, 0.0), lambda: 0.0)

    def insert(self, *tokens: int, salt: str = "") -> None:
        blocks = self.blocks.take(-(-len(tokens) // 2))
        slot = self.slots.take()
        assert slot is not None
        self.cache.insert(space_of("", salt), encode(tokens), blocks, slot)
        self.blocks.release(blocks)
        self.check()

    def hit(self, *tokens: int, salt: str = "") -> int:
        node = self.cache.hit(self.cache.tree.find(space_of("", salt), encode(tokens)), len(tokens), 1)
        return 0 if node is None else node.end

    def check(self) -> None:
        self.blocks.check([], self.cache.held_blocks())
        self.slots.check(self.cache.held_slots())


def test_a_hit_reaches_to_the_deepest_snapshot() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5)
    assert cache.hit(1, 2, 3, 4, 5, 6, 7) == 5
    assert cache.hit(1, 2, 3, 9) == 0
    cache.insert(1, 2, 3)
    assert cache.hit(1, 2, 3, 9) == 3
    assert cache.hit(1, 2, 3, 4, 5, salt="other") == 0


def test_everything_can_be_evicted() -> None:
    cache = Cache()
    for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 7), (8, 9), (1, 2)):
        cache.insert(*tokens)
    while cache.cache.evict_slot():
        cache.check()
    assert (cache.blocks.free, cache.slots.free) == (19, 9)
