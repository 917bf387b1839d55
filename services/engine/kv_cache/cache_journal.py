"""Journal of the device's prefix cache: the changes of its nodes, for indexes outside of the engine.

The cache's thread only notes what happened to which node; hashes of blocks are made of that elsewhere (BlockHashes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace, bytes_to_tokens
from services.engine.kv_cache.radix_tree import Node

HASH_BYTES = 8
"""Bytes of a hash: readers of these events take whole numbers of 64 bits."""


class NodeStored(NamedTuple):
    """Requests can use the KV of a node."""

    number: int
    parent: int | None
    """Number of the node above; None: the root."""
    namespace: Namespace
    start: int
    label: bytes


class NodeSplit(NamedTuple):
    """A node has been split; its upper part has a number of its own."""

    number: int
    upper: int
    at: int
    """Position of the first token that the lower part keeps."""


class NodeRemoved(NamedTuple):
    """A node has lost its KV."""

    number: int


class SnapshotKept(NamedTuple):
    """Requests can resume from the state at the end of a node."""

    number: int


class SnapshotDropped(NamedTuple):
    """A node has lost its state."""

    number: int


class CacheCleared(NamedTuple):
    """The cache has been replaced by an empty one."""


CacheChange = NodeStored | NodeSplit | NodeRemoved | SnapshotKept | SnapshotDropped | CacheCleared


class CacheJournal:
    """Journal of one prefix cache, which calls it for each change. Not thread-safe."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] = []
        self._numbers: dict[Node, int] = {}
        """Numbers of the nodes that are stored."""
        self._snapshots: set[int] = set()
        """Numbers of the nodes with a snapshot."""
        self._next = 0

    def take(self) -> list[CacheChange]:
        """Changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes

    def stored(self, node: Node) -> None:
        """Requests can use a node's blocks, and its snapshot if it has one."""
        number = self._numbers.get(node)
        if number is None:
            above = node.parent
            if above is None or (above.parent is not None and above not in self._numbers):
                return  # without the node above nobody could tell the prefix
            number = self._number(node)
            root = above.namespace if above.parent is None else _root(above).namespace
            self._changes.append(NodeStored(number, self._numbers.get(above), root, node.start, node.label))
        if node.slot and number not in self._snapshots:
            self._snapshots.add(number)
            self._changes.append(SnapshotKept(number))

    def removed(self, node: Node) -> None:
        """A node loses its blocks."""
        number = self._numbers.pop(node, None)
        if number is not None:
            self._changes.append(NodeRemoved(number))

    def snapshot_removed(self, node: Node) -> None:
        """A node loses its snapshot, not after its blocks."""
        number = self._numbers.get(node)
        if number in self._snapshots:
            self._snapshots.remove(number)
            self._changes.append(SnapshotDropped(number))

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been split."""
        number = self._numbers.get(lower)
        if number is not None:
            self._changes.append(NodeSplit(number, self._number(upper), lower.start))

    def _number(self, node: Node) -> int:
        number = self._numbers[node] = self._next
        self._next += 1
        return number


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


HashedChange = BlocksStored | BlocksRemoved | SnapshotStored | SnapshotRemoved | CacheCleared


@dataclass(slots=True)
class _Hashed:
    """A node as BlockHashes knows it."""

    namespace: Namespace
    start: int
    before: int | None
    """Hash of the last whole block that ends before or at its start."""
    tokens: bytes
    """From the end of that block to the end of the node."""
    hashes: tuple[int, ...]
    """Hashes of the whole blocks that end in the node."""

    @property
    def last(self) -> int | None:
        """Hash of the last whole block that ends before or at its end."""
        return self.hashes[-1] if self.hashes else self.before


class BlockHashes:
    """Hashes of the blocks and snapshots that changes of nodes are about.

    A whole block belongs to the node that has its last token, so that it is stored once and removed once wherever nodes
    are split. Its hash covers the tokens of the whole prefix and its namespace. A snapshot may lie inside a block: its
    hash is that of the tokens behind the last whole block, and never that of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._nodes: dict[int, _Hashed] = {}
        self._snapshots: dict[int, int] = {}
        """Hashes of snapshots by their nodes' numbers."""

    def follow(self, change: CacheChange) -> Iterator[HashedChange]:
        """What a change means for blocks and snapshots; all changes must be followed, each once."""
        match change:
            case NodeStored():
                yield from self._store(change)
            case NodeSplit():
                self._split(change)
            case NodeRemoved():
                if hashes := self._nodes.pop(change.number).hashes:
                    yield BlocksRemoved(hashes)
            case SnapshotKept():
                yield self._keep(change.number)
            case SnapshotDropped():
                yield SnapshotRemoved(self._snapshots.pop(change.number))
            case CacheCleared():
                self._nodes, self._snapshots = {}, {}
                yield change

    def _store(self, change: NodeStored) -> Iterator[BlocksStored]:
        above = None if change.parent is None else self._nodes[change.parent]
        before, rest = (None, b"") if above is None else (above.last, self._rest(above))
        tokens, step = rest + change.label, self._block_size * TOKEN_BYTES
        whole = len(tokens) - len(tokens) % step
        hashes, last = list[int](), before
        for at in range(0, whole, step):
            last = _hash(change.namespace, last, tokens[at : at + step])
            hashes.append(last)
        self._nodes[change.number] = _Hashed(change.namespace, change.start, before, tokens, tuple(hashes))
        if hashes:
            yield BlocksStored(change.namespace, tuple(hashes), before, tuple(bytes_to_tokens(tokens[:whole])))

    def _split(self, change: NodeSplit) -> None:
        node, size = self._nodes[change.number], self._block_size
        first = node.start // size * size
        count = change.at // size - node.start // size
        tokens = node.tokens[: (change.at - first) * TOKEN_BYTES]
        upper = _Hashed(node.namespace, node.start, node.before, tokens, node.hashes[:count])
        self._nodes[change.upper] = upper
        self._nodes[change.number] = _Hashed(
            node.namespace,
            change.at,
            upper.last,
            node.tokens[count * size * TOKEN_BYTES :],
            node.hashes[count:],
        )

    def _keep(self, number: int) -> SnapshotStored:
        node = self._nodes[number]
        rest = self._rest(node)
        found = self._snapshots[number] = _hash(node.namespace, node.last, rest, person=b"snapshot")
        return SnapshotStored(node.namespace, found, node.last, tuple(bytes_to_tokens(rest)))

    def _rest(self, node: _Hashed) -> bytes:
        """Tokens of a prefix behind its last whole block."""
        return node.tokens[len(node.hashes) * self._block_size * TOKEN_BYTES :]


def _root(node: Node) -> Node:
    """Root above a node. It says what the namespace was made from as soon as any request has."""
    while node.parent is not None:
        node = node.parent
    return node


def _hash(namespace: Namespace, parent: int | None, tokens: bytes, person: bytes = b"block") -> int:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    digest.update(namespace if parent is None else parent.to_bytes(HASH_BYTES, "big"))
    digest.update(tokens)
    return int.from_bytes(digest.digest(), "big")
