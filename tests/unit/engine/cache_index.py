"""An index outside of the engine that follows the prefix cache's changes, and what the cache itself has."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.kv_cache.cache_journal import (
    BlockHashes,
    BlocksRemoved,
    BlocksStored,
    CacheChange,
    CacheCleared,
    HashedChange,
    SnapshotRemoved,
    SnapshotStored,
)
from services.engine.kv_cache.keys import bytes_to_tokens
from services.engine.scheduler.scheduler import Scheduler

Prefix = tuple[bytes, tuple[int, ...]]
"""A namespace and all tokens of a prefix in it."""


class CacheIndex:
    """Blocks and snapshots by hash, with the whole prefix that each says."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = BlockHashes(block_size)
        self.blocks: dict[int, Prefix] = {}
        self.snapshots: dict[int, Prefix] = {}

    def follow(self, changes: Sequence[CacheChange]) -> None:
        for hashed in (each for change in changes for each in self._hashes.follow(change)):
            self._take(hashed)

    def _take(self, change: HashedChange) -> None:
        match change:
            case BlocksStored():
                self.store_blocks(change.namespace, change.hashes, change.parent, change.token_ids)
            case BlocksRemoved():
                self.remove_blocks(change.hashes)
            case SnapshotStored():
                self.store_snapshot(change.namespace, change.hash, change.parent, change.token_ids)
            case SnapshotRemoved():
                del self.snapshots[change.hash]
            case CacheCleared():
                self.blocks, self.snapshots = {}, {}

    def store_blocks(
        self, namespace: bytes, hashes: Sequence[int], parent: int | None, token_ids: Sequence[int]
    ) -> None:
        assert hashes
        assert len(token_ids) == len(hashes) * self._block_size
        before = self._before(namespace, parent)
        for count, one in enumerate(hashes, 1):
            assert one not in self.blocks, "stored twice"
            self.blocks[one] = (namespace, (*before, *token_ids[: count * self._block_size]))

    def remove_blocks(self, hashes: Sequence[int]) -> None:
        for one in hashes:
            del self.blocks[one]

    def store_snapshot(self, namespace: bytes, found: int, parent: int | None, token_ids: Sequence[int]) -> None:
        assert len(token_ids) < self._block_size
        assert found not in self.snapshots, "stored twice"
        assert found not in self.blocks, "the hash of a block"
        self.snapshots[found] = (namespace, (*self._before(namespace, parent), *token_ids))

    def _before(self, namespace: bytes, parent: int | None) -> tuple[int, ...]:
        """Tokens up to the end of a block that is there."""
        if parent is None:
            return ()
        space, tokens = self.blocks[parent]
        assert space == namespace
        return tokens

    def check(self, scheduler: Scheduler) -> None:
        """Compares the index with what the prefix cache has. While a step computes a node's blocks, or only another
        snapshot of it, they may be in the index or not."""
        blocks, snapshots, pending = books(scheduler, self._block_size)
        found = set(self.blocks.values())
        assert blocks <= found <= blocks | pending
        assert set(self.snapshots.values()) == snapshots
        assert len(found) == len(self.blocks)


def books(scheduler: Scheduler, block_size: int) -> tuple[set[Prefix], set[Prefix], set[Prefix]]:
    """Prefixes that end with a whole block, those that end with a snapshot, which requests can use now, and those that
    end with a block of a node that is pending."""
    blocks: set[Prefix] = set()
    pending: set[Prefix] = set()
    snapshots: set[Prefix] = set()
    for node in scheduler._memory.cache.tree:
        if node.blocks is None:
            continue
        space, tokens = bytes(node.namespace), tuple(bytes_to_tokens(node.tokens()))
        ends = range((node.start // block_size + 1) * block_size, node.end + 1, block_size)
        (blocks if node.pending is None else pending).update((space, tokens[:end]) for end in ends)
        if node.slot and node.pending is None:
            snapshots.add((space, tokens))
    return blocks, snapshots, pending
