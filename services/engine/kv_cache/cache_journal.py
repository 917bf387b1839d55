"""Journal of the device's prefix cache: what it has stored and removed, by hash, for indexes outside of the engine.

A whole block belongs to the node that has its last token, so that it is stored once and removed once wherever nodes are
split. Its hash covers the tokens of the whole prefix and its namespace. A snapshot may lie inside a block: its hash is
that of the tokens behind the last whole block, and never that of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace, bytes_to_tokens
from services.engine.kv_cache.radix_tree import Node

HASH_BYTES = 8
"""Bytes of a hash: readers of these events take whole numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Whole blocks, one behind the other, that requests can use now."""

    namespace: Namespace
    hashes: tuple[int, ...]
    parent: int | None
    """Hash of the block before them; None: they begin the prefix."""
    token_ids: tuple[int, ...]
    """Their tokens, as many as blocks times their size."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are not in the cache any more."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A state that requests can resume from now."""

    namespace: Namespace
    hash: int
    parent: int | None
    """Hash of the last whole block before it; None: it lies in the first one."""
    token_ids: tuple[int, ...]
    """Tokens between that block and the snapshot; none: it lies at the end of the block."""


@dataclass(frozen=True, slots=True)
class SnapshotRemoved:
    """A state that is not in the cache any more."""

    hash: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The cache has been replaced by an empty one."""


CacheChange = BlocksStored | BlocksRemoved | SnapshotStored | SnapshotRemoved | CacheCleared


class CacheJournal:
    """Journal of one prefix cache, which calls it for each change. Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changes: list[CacheChange] = []
        self._blocks: dict[Node, tuple[int, ...]] = {}
        """Hashes of the whole blocks of each node that is stored."""
        self._snapshots: dict[Node, int] = {}

    def take(self) -> list[CacheChange]:
        """Changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def stored(self, node: Node) -> None:
        """A node's blocks can be used, and its snapshot if it has one."""
        if node not in self._blocks:
            self._store_blocks(node)
        if node.slot and node not in self._snapshots:
            self._store_snapshot(node)

    def blocks_removed(self, node: Node) -> None:
        """A node loses its blocks."""
        hashes = self._blocks.pop(node, ())
        if hashes:
            self._changes.append(BlocksRemoved(hashes))

    def snapshot_removed(self, node: Node) -> None:
        """A node loses its snapshot."""
        found = self._snapshots.pop(node, None)
        if found is not None:
            self._changes.append(SnapshotRemoved(found))

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been split: nothing changes but the node that a block belongs to."""
        hashes = self._blocks.get(lower)
        if hashes is not None:
            count = upper.end // self._block_size - upper.start // self._block_size
            self._blocks[upper], self._blocks[lower] = hashes[:count], hashes[count:]

    def held(self) -> tuple[set[int], set[int]]:
        """Hashes of all blocks and of all snapshots that are stored."""
        return {one for hashes in self._blocks.values() for one in hashes}, set(self._snapshots.values())

    def _store_blocks(self, node: Node) -> None:
        size = self._block_size
        first, last = node.start // size, node.end // size
        if first == last:
            self._blocks[node] = ()
            return
        parent = self._last_hash(node.parent)
        tokens = node.tokens(first * size)[: (last - first) * size * TOKEN_BYTES]
        step = size * TOKEN_BYTES
        before, hashes = parent, list[int]()
        for at in range(0, len(tokens), step):
            before = _hash(node.namespace, before, tokens[at : at + step])
            hashes.append(before)
        self._blocks[node] = tuple(hashes)
        self._changes.append(BlocksStored(_named(node), tuple(hashes), parent, tuple(bytes_to_tokens(tokens))))

    def _store_snapshot(self, node: Node) -> None:
        parent = self._last_hash(node)
        tokens = node.tokens(node.end // self._block_size * self._block_size)
        found = _hash(node.namespace, parent, tokens, person=b"snapshot")
        self._snapshots[node] = found
        self._changes.append(SnapshotStored(_named(node), found, parent, tuple(bytes_to_tokens(tokens))))

    def _last_hash(self, node: Node | None) -> int | None:
        """Hash of the last whole block at or above a node."""
        return next((hashes[-1] for each in _upwards(node) if (hashes := self._blocks.get(each))), None)


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _named(node: Node) -> Namespace:
    """Namespace of a node as its root has it, which is named by the newest request."""
    *_, root = _upwards(node)
    return root.namespace


def _hash(namespace: Namespace, parent: int | None, tokens: bytes, person: bytes = b"block") -> int:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    digest.update(namespace if parent is None else parent.to_bytes(HASH_BYTES, "big"))
    digest.update(tokens)
    return int.from_bytes(digest.digest(), "big")
