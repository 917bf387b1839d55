"""Blocks, slots and the prefix tree on their own."""

from __future__ import annotations

import pytest

from services.engine.memory.blocks import BlockPool
from services.engine.memory.integrity import IntegrityError
from services.engine.memory.prefix import PrefixCache
from services.engine.memory.slots import SlotPool

BASE = ("", "")


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
    with pytest.raises(IntegrityError):
        pool.cache(block)
    pool.release([block])
    with pytest.raises(IntegrityError):
        pool.release([block])
    for held, cached in (([block], [block]), ([], []), ([0], [block]), ([], [block, block])):
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
        self.cache = PrefixCache(self.blocks, self.slots, 2)

    def insert(self, tokens: tuple[int, ...], namespace: tuple[str, str] = BASE) -> None:
        blocks = self.blocks.take(len(tokens) // 2)
        slot = self.slots.take()
        assert slot is not None
        self.cache.insert(namespace, tokens, blocks, slot)
        self.blocks.release(blocks)
        self.check()

    def hit(self, tokens: tuple[int, ...], namespace: tuple[str, str] = BASE) -> tuple[int, int]:
        match = self.cache.match(namespace, tokens, len(tokens) // 2 * 2)
        assert (match.node is None) == (len(match.blocks) == 0)
        return len(match.blocks), match.shared_blocks

    def check(self) -> None:
        self.blocks.check([], self.cache.held_blocks())
        self.slots.check(self.cache.held_slots())


def test_a_hit_reaches_to_the_deepest_snapshot() -> None:
    cache = Cache()
    cache.insert((1, 2, 3, 4, 5, 6))
    assert cache.hit((1, 2, 3, 4, 5, 6, 7, 8)) == (3, 3)
    assert cache.hit((1, 2, 3, 4, 9, 9)) == (0, 2)
    cache.insert((1, 2, 3, 4))
    assert cache.hit((1, 2, 3, 4, 9, 9)) == (2, 2)
    assert cache.hit((2, 1, 3, 4)) == (0, 0)
    assert cache.hit((1, 2, 3, 4), ("digest", "")) == (0, 0)
    assert cache.hit((1, 2, 3, 4), ("", "salt")) == (0, 0)


def test_a_path_that_exists_is_not_stored_twice() -> None:
    cache = Cache()
    cache.insert((1, 2, 3, 4))
    cache.insert((1, 2, 3, 4))
    assert (cache.blocks.idle, cache.cache.num_snapshots) == (2, 1)
    cache.insert((1, 2, 5, 6))
    assert (cache.blocks.idle, cache.cache.num_snapshots) == (3, 2)


def test_eviction_is_least_recently_used_first_and_takes_useless_blocks_along() -> None:
    cache = Cache()
    cache.insert((1, 2, 3, 4, 5, 6))
    cache.insert((1, 2))
    cache.insert((7, 8))
    node = cache.cache.match(BASE, (1, 2), 2).node
    assert node is not None
    cache.cache.pin(node)
    cache.cache.unpin(node)
    assert cache.cache.evict_slot()
    cache.check()
    assert cache.hit((1, 2, 3, 4, 5, 6)) == (1, 1)
    assert cache.cache.evict_slot()
    assert cache.hit((7, 8)) == (0, 0)
    assert cache.cache.evict_slot()
    assert not cache.cache.evict_slot()
    assert (cache.blocks.free, cache.slots.free) == (19, 9)


def test_pinned_snapshots_stay() -> None:
    cache = Cache()
    cache.insert((1, 2))
    node = cache.cache.match(BASE, (1, 2), 2).node
    assert node is not None
    cache.cache.pin(node)
    assert not cache.cache.evict_slot()
    assert not cache.cache.evict_blocks()
    cache.cache.unpin(node)
    with pytest.raises(IntegrityError):
        cache.cache.unpin(node)
    cache.cache.clear()
    assert cache.blocks.free == 19
    with pytest.raises(IntegrityError):
        cache.cache.pin(node)


def test_blocks_are_freed_from_the_leaves() -> None:
    cache = Cache()
    cache.insert((1, 2))
    cache.insert((1, 2, 3, 4))
    assert cache.cache.evict_blocks()
    cache.check()
    assert cache.hit((1, 2, 3, 4)) == (1, 1)
    assert cache.cache.evict_blocks()
    assert not cache.cache.evict_blocks()
    assert cache.blocks.free == 19
