"""Reuse of computed prompts: a radix tree over block-aligned token runs.

A node is one full block: its KV and, at chosen depths, a snapshot of the recurrent state behind it. A hit needs both,
so it reaches to the deepest snapshot on the prompt's path; the path beyond it tells where a snapshot would have helped
(the branch point, where the scheduler takes the next one). Every leaf has a snapshot: blocks that lead to none could
never be used, so they go with their last snapshot and one LRU order over snapshots suffices.

Nodes are found by the block's tokens themselves (dict keys compare them), and roots by the adapter's digest and the
cache salt, so a hash collision or another policy's KV can never be taken for a hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.memory.blocks import BlockPool
from services.engine.memory.integrity import IntegrityError
from services.engine.memory.slots import SlotPool

Namespace = tuple[str, str]
"""(adapter digest, cache salt)."""
_ROOT = 0
"""The scratch block stands in for the block of a root, which has none."""


class Node:
    """One cached block; ``slot`` is its state snapshot's, None if there is none."""

    __slots__ = ("block", "children", "key", "parent", "pins", "slot")

    def __init__(self, parent: Node | None, key: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[tuple[int, ...], Node] = {}
        self.slot: int | None = None
        self.pins = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache knows of a prompt."""

    node: Node | None
    """The deepest snapshot on the prompt's path, None for a miss."""
    blocks: Sequence[int]
    """KV blocks up to that snapshot."""
    shared_blocks: int
    """How many blocks of the prompt are known at all; beyond ``len(blocks)`` they lack a snapshot."""


class PrefixCache:
    """Owns one reference to each cached block and the slots of all snapshots. Not thread-safe."""

    def __init__(self, blocks: BlockPool, slots: SlotPool, block_size: int) -> None:
        self._blocks = blocks
        self._slots = slots
        self._block_size = block_size
        self._roots: dict[Namespace, Node] = {}
        self._snapshots: OrderedDict[Node, Namespace] = OrderedDict()
        """Least recently used first."""

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Match:
        """Looks up the first ``limit`` tokens (a multiple of the block size)."""
        node = self._roots.get(namespace)
        if node is None:
            return Match(None, (), 0)
        hit: Node | None = None
        hit_blocks = 0
        path: list[int] = []
        for start in range(0, limit, self._block_size):
            child = node.children.get(tuple(tokens[start : start + self._block_size]))
            if child is None:
                break
            node = child
            path.append(node.block)
            if node.slot is not None:
                hit, hit_blocks = node, len(path)
        return Match(hit, path[:hit_blocks], len(path))

    def pin(self, node: Node) -> int:
        """Keeps a snapshot from eviction while a step restores from it; returns its slot. Counts as a use."""
        if node.slot is None:
            raise IntegrityError("a node without a snapshot is pinned")
        node.pins += 1
        self._snapshots.move_to_end(node)
        return node.slot

    def unpin(self, node: Node) -> None:
        if node.pins < 1:
            raise IntegrityError("a node is unpinned that is not pinned")
        node.pins -= 1

    def insert(self, namespace: Namespace, tokens: Sequence[int], blocks: Sequence[int], slot: int) -> None:
        """Adds a computed prefix and the snapshot behind it; the cache owns ``slot`` from here on.

        Args:
            tokens: the prefix, a whole number of blocks.
            blocks: their KV, held by the caller. Where the path exists already, the cache keeps its own.
        """
        node = self._roots.setdefault(namespace, Node(None, (), _ROOT))
        for index, start in enumerate(range(0, len(tokens), self._block_size)):
            key = tuple(tokens[start : start + self._block_size])
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, blocks[index])
                self._blocks.cache(child.block)
                node.children[key] = child
            node = child
        if node.slot is not None:
            self._slots.release(slot)
        else:
            node.slot = slot
        self._snapshots[node] = namespace
        self._snapshots.move_to_end(node)

    def evict_slot(self) -> bool:
        """Gives up the least recently used snapshot, and the blocks that only it made useful; False: there is none."""
        return self._evict(leaves_only=False)

    def evict_blocks(self) -> bool:
        """Gives up the least recently used leaf and its blocks; False if there is none."""
        return self._evict(leaves_only=True)

    def clear(self) -> None:
        """Gives up everything that no step in flight restores from."""
        while self._evict(leaves_only=True):
            pass

    def held_blocks(self) -> Iterator[int]:
        """Every cached block, for the integrity check."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            if node.slot is None and not node.children:
                raise IntegrityError(f"cached block {node.block} leads to no snapshot")
            yield node.block
            stack.extend(node.children.values())

    def held_slots(self) -> Iterator[int]:
        """Every snapshot's slot, for the integrity check."""
        for node in self._snapshots:
            if node.slot is None:
                raise IntegrityError("a snapshot without a slot is listed")
            yield node.slot

    def _evict(self, *, leaves_only: bool) -> bool:
        for node, namespace in self._snapshots.items():
            if not node.pins and not (leaves_only and node.children):
                del self._snapshots[node]
                self._drop(node, namespace)
                return True
        return False

    def _drop(self, node: Node, namespace: Namespace) -> None:
        if node.slot is not None:
            self._slots.release(node.slot)
            node.slot = None
        while node.parent is not None and node.slot is None and not node.children:
            self._blocks.uncache(node.block)
            del node.parent.children[node.key]
            node = node.parent
        if node.parent is None and not node.children:
            del self._roots[namespace]
