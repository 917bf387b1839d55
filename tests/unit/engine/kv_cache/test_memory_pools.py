"""Blocks, slots and the prefix tree on their own."""

from __future__ import annotations

import random

import pytest

from services.engine.kv_cache.block_pool import BlockPool, IntegrityError
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.keys import TOKEN_BYTES, namespace_of, tokens_to_bytes
from services.engine.kv_cache.prefix_cache import PrefixCache, Sizes
from services.engine.kv_cache.radix_tree import InFlightNodes, Node, PrefixMatch, RadixTree
from services.engine.kv_cache.state_pool import StatePool


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
    pool = StatePool(3)
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
        StatePool(1)


class Cache:
    """A prefix cache over blocks of two tokens, whose writers let go at once."""

    def __init__(self) -> None:
        self.blocks = BlockPool(20)
        self.slots = StatePool(10)
        self.cache = PrefixCache(self.blocks, self.slots, 2, Sizes(), ComputeCost(1.0, 0.0), lambda: 0.0)

    def insert(self, *tokens: int, salt: str = "") -> Node:
        blocks = self.blocks.take(-(-len(tokens) // 2))
        slot = self.slots.take()
        assert slot is not None
        node = self.cache.insert(namespace_of("", salt), tokens_to_bytes(tokens), blocks, slot)
        self.blocks.release(blocks)
        self.check()
        return node

    def hit(self, *tokens: int, salt: str = "") -> int:
        node = self.cache.hit(self.cache.tree.find(namespace_of("", salt), tokens_to_bytes(tokens)), len(tokens), 1)
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


def test_a_path_that_exists_is_not_stored_twice() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, 3, 4)
    assert (cache.blocks.idle, cache.cache.num_snapshots) == (2, 1)
    cache.insert(1, 2, 5, 6)
    assert (cache.blocks.idle, cache.cache.num_snapshots) == (3, 2)


def test_a_block_that_two_nodes_share_stays_for_either() -> None:
    """A history is cut inside of a block: the first part needs its beginning, the rest all of it."""
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5, 6)
    cache.insert(1, 2, 3)
    assert cache.blocks.idle == 3
    short = cache.cache.tree.find(namespace_of("", ""), tokens_to_bytes((1, 2, 3))).nodes[-1]
    assert cache.cache.evict_blocks()
    cache.check()
    assert (cache.hit(1, 2, 3, 4, 5, 6), cache.blocks.idle, short.blocks is not None) == (3, 2, True)
    assert cache.cache.evict_blocks()
    assert cache.blocks.free == 19


def test_what_is_worth_least_goes_first() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5, 6)
    used = cache.insert(7, 8)
    cache.insert(9, 10, 11)
    for _ in range(5):
        cache.cache.touch(used)
    assert cache.cache.evict_slot()
    assert (cache.hit(1, 2, 3, 4, 5, 6), cache.hit(7, 8), cache.hit(9, 10, 11)) == (6, 2, 0), "three tokens to compute"
    assert cache.cache.evict_slot()
    assert (cache.hit(1, 2, 3, 4, 5, 6), cache.hit(7, 8)) == (0, 2), "it was used once, the other one six times"
    cache.check()


def test_an_inner_snapshot_leaves_its_blocks_to_those_behind_it() -> None:
    cache = Cache()
    cache.insert(1, 2)
    last = cache.insert(1, 2, 3, 4)
    cache.cache.keep(last, 10.0)
    assert cache.cache.evict_slot()
    cache.check()
    assert (cache.hit(1, 2), cache.hit(1, 2, 3, 4)) == (0, 4)


def test_kept_snapshots_go_last() -> None:
    cache = Cache()
    kept = cache.insert(1, 2)
    cache.cache.keep(kept, 10.0)
    cache.insert(3, 4, 5, 6, 7, 8)
    assert cache.cache.evict_slot()
    assert (cache.hit(1, 2), cache.hit(3, 4, 5, 6, 7, 8)) == (2, 0)
    assert cache.cache.evict_slot()
    assert not cache.cache.evict_slot()
    assert (cache.blocks.free, cache.slots.free) == (19, 9)


def test_pinned_snapshots_stay() -> None:
    cache = Cache()
    node = cache.insert(1, 2)
    cache.cache.pin(node)
    assert not cache.cache.evict_slot()
    assert not cache.cache.evict_blocks()
    cache.cache.unpin(node)
    with pytest.raises(IntegrityError):
        cache.cache.unpin(node)
    cache.cache.clear()
    assert cache.blocks.free == 19


def test_blocks_are_freed_from_the_leaves() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.insert(1, 2, 3, 4)
    assert cache.cache.evict_blocks()
    cache.check()
    assert cache.hit(1, 2, 3, 4) == 2
    assert cache.cache.evict_blocks()
    assert not cache.cache.evict_blocks()
    assert cache.blocks.free == 19


def test_nobody_goes_on_from_a_step_in_flight() -> None:
    cache = Cache()
    pending = InFlightNodes()
    for tokens, of in (((1, 2), None), ((1, 2, 3, 4), pending), ((1, 2, 3, 4, 5), None)):
        blocks, slot = cache.blocks.take(-(-len(tokens) // 2)), cache.slots.take()
        assert slot is not None
        cache.cache.insert(namespace_of("", ""), tokens_to_bytes(tokens), blocks, slot, of)
        cache.blocks.release(blocks)
    assert cache.hit(1, 2, 3, 4, 5) == 2, "what is behind stands on it"
    assert len(cache.cache.confirm(pending)) == 1
    assert cache.hit(1, 2, 3, 4, 5) == 5


def test_a_step_that_failed_takes_what_stands_on_it_along() -> None:
    cache = Cache()
    cache.insert(1, 2)
    pending = InFlightNodes()
    blocks, slot = cache.blocks.take(2), cache.slots.take()
    assert slot is not None
    cache.cache.insert(namespace_of("", ""), tokens_to_bytes((1, 2, 3, 4)), blocks, slot, pending)
    cache.blocks.release(blocks)
    cache.insert(1, 2, 3, 4, 5, 6)
    cache.cache.discard(pending)
    cache.check()
    assert (cache.hit(1, 2, 3, 4, 5, 6), cache.blocks.idle, cache.cache.num_snapshots) == (2, 1, 1)


def test_blocks_that_a_copy_holds_are_nobodys_for_the_asking() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.cache(block)
    pool.release([block])
    pool.hold_for_copy([block])
    assert (pool.idle, pool.used, pool.free) == (0, 0, 2)
    pool.share([block])
    assert pool.used == 1
    with pytest.raises(IntegrityError):
        pool.check([block], [block], [])
    pool.check([block], [block], [block])
    pool.release([block])
    with pytest.raises(IntegrityError):
        pool.release([block])
    pool.uncache(block)
    assert (pool.free, pool.used) == (2, 0)
    pool.release_copy([block])
    assert pool.free == 3
    with pytest.raises(IntegrityError):
        pool.release_copy([block])


def test_a_search_that_goes_on_from_an_earlier_one_finds_the_same() -> None:
    """Whatever is added, cut and removed meanwhile; also for a history that has grown."""
    rng = random.Random(3)
    tree, namespace = RadixTree(), namespace_of("", "")

    def some(length: int) -> bytes:
        return tokens_to_bytes(tuple(rng.randrange(2) for _ in range(length)))

    searches: list[tuple[bytes, PrefixMatch]] = []
    resumed = 0
    for _ in range(4000):
        what = rng.randrange(4)
        if what == 0:
            tokens = some(rng.randrange(1, 12))
            node = tree.root(namespace)
            while node.end * TOKEN_BYTES < len(tokens):
                node, _ = tree.descend(node, tokens)
        elif what == 1 and (leaves := [node for node in tree if not node.children]):
            tree.remove(rng.choice(leaves))
        elif what == 2 or not searches:
            tokens = some(rng.randrange(1, 12))
            searches.append((tokens, tree.find(namespace, tokens)))
        else:
            at = rng.randrange(len(searches))
            tokens, before = searches[at]
            tokens += some(rng.choice((0, 0, 1, 3)))
            found = tree.find(namespace, tokens, before)
            fresh = tree.find(namespace, tokens)
            assert (found.nodes, found.matched, found.diverging) == (fresh.nodes, fresh.matched, fresh.diverging)
            searches[at] = tokens, found
            resumed += 1
    assert resumed > 500
