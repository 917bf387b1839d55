"""Prefix cache: reuse of the KV and states of computed token prefixes, on the device and in the tiers.

A hit needs the KV of a prefix and a state snapshot at its end. So it reaches to the deepest snapshot whose KV is there,
at any token. The sequence shares the blocks; if the snapshot ends inside a block, the sequence gets a copy of that one.
The KV of a node is on the device only if that of all nodes above is. A node is removed when neither it nor any node
below it has a snapshot or an entry of a tier.

Snapshots lose their slot and leaves their blocks in the order of the time that they save for each byte (see
EvictionQueue). An eviction copies nothing, so nothing waits for it: what the tiers should keep was saved to them
before.

Nodes are found by the tokens themselves. Prefixes of different adapters or cache salts are kept apart by namespaces
(160 bits of BLAKE2b), so KV of another policy is never a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.engine.kv_cache.block_pool import BlockPool, IntegrityError
from services.engine.kv_cache.cache_journal import CacheJournal
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.eviction import EvictionQueue
from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace
from services.engine.kv_cache.radix_tree import InFlightNodes, Node, PrefixMatch, RadixTree
from services.engine.kv_cache.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a KV block and of a state slot, bytes."""

    block: int = 1
    slot: int = 1


class PrefixCache:
    """Prefix cache of the device. Owns its nodes' references to blocks and the slots of all snapshots. Not thread-safe.

    Args:
        cost: time that computing tokens takes.
        reload_seconds: seconds to get a snapshot back from a tier; None: no tier has it.
        clock: monotonic seconds.
        journal: is told of each change; None: nobody reads it.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: StatePool,
        block_size: int,
        sizes: Sizes,
        cost: ComputeCost,
        clock: Callable[[], float],
        reload_seconds: Callable[[Node], float | None] = lambda _: None,
        journal: CacheJournal | None = None,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._block_size = block_size
        self._sizes = sizes
        self._cost = cost
        self._clock = clock
        self._reload_seconds = reload_seconds
        self._journal = journal
        self.tree = RadixTree()
        self._snapshots: EvictionQueue[Node] = EvictionQueue()
        """Nodes that have a snapshot on the device."""
        self._leaves: EvictionQueue[Node] = EvictionQueue()
        """Nodes that have blocks while no node below them has any."""
        self._kept: dict[Node, float] = {}
        """End of each node's pin, on the clock."""
        self.evicted_bytes = 0
        """Bytes evicted since the start."""

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # Lookup.

    def hit(self, path: PrefixMatch, limit: int, unit: int) -> Node | None:
        """Deepest node of a match that a sequence can resume from now; its end is a multiple of ``unit``, at most
        ``limit``."""
        found: Node | None = None
        for node in path.nodes:
            if node.end > limit or node.blocks is None or node.pending is not None:
                break
            if node.slot and node.end % unit == 0:
                found = node
        return found

    def resident(self, path: PrefixMatch) -> int:
        """Number of nodes of a match whose KV is on the device."""
        return next((at for at, node in enumerate(path.nodes) if node.blocks is None), len(path.nodes))

    def block_table(self, nodes: Sequence[Node]) -> list[int]:
        """Block table of the prefix that these nodes spell, a path from below the root."""
        table: list[int] = []
        for node in nodes:
            if node.blocks is None:
                raise IntegrityError("a hit includes a node without KV")
            # A node that begins inside a block has a copy of that block with the tokens before it, too.
            del table[node.start // self._block_size :]
            table += node.blocks
        return table

    def prefix_bytes(self, node: Node) -> int:
        """Bytes on the device of the prefix that ends at a node: its blocks, and the snapshot at its end."""
        blocks = sum(len(each.blocks or ()) for each in node.path())
        return self._sizes.block * blocks + (self._sizes.slot if node.slot else 0)

    # Use.

    def pin(self, node: Node) -> None:
        """Keeps a node's blocks and snapshot from eviction while a step or a copy reads them."""
        node.pins += 1
        self._hold(node)

    def unpin(self, node: Node) -> None:
        if node.pins < 1:
            raise IntegrityError("a node is unpinned, but was not pinned")
        node.pins -= 1
        self._hold(node)
        self.prune(node)

    def touch(self, node: Node) -> None:
        """Counts a use: a sequence resumed from the node's snapshot."""
        for queue in (self._snapshots, self._leaves):
            if node in queue:
                queue.touch(node)

    def keep(self, node: Node, until: float) -> None:
        """Evicts a node's blocks and snapshot only when nothing else is left, until a time on the clock; 0 ends
        that."""
        for queue in (self._snapshots, self._leaves):
            if node in queue:
                queue.pin(node, until)
        if until and node.slot:
            self._kept[node] = until
        else:
            self._kept.pop(node, None)

    # Insertion.

    def insert(
        self,
        namespace: Namespace,
        tokens: bytes,
        blocks: Sequence[int],
        slot: int,
        pending: InFlightNodes | None = None,
    ) -> Node:
        """Adds a computed prefix and the snapshot at its end; the cache owns ``slot`` from here on.

        Args:
            blocks: its KV from the first token on, held by the caller. Where the cache has KV already, it keeps its
                own.
            pending: nodes of the step in flight that computes the end of the prefix; None: it is computed.
        """
        node = self.ensure_node(namespace, tokens)
        for each in node.path():
            if each.blocks is None:
                self._fill(each, blocks)
                self._await(each, pending)
                self._record(each)
        if node.slot:
            self._slots.release(slot)
            return node
        node.slot = slot
        self._await(node, pending)
        self._snapshots.add(node, self._price(node), self._sizes.slot)
        if node in self._leaves:
            self._leaves.update(node, self._price(node), self._size(node))
        self._hold(node)
        self._record(node)
        return node

    def confirm(self, pending: InFlightNodes) -> list[Node]:
        """Confirms the nodes of a step that has run. Returns those that are new or have a new snapshot."""
        certain = [node for node in pending.nodes if node.pending is pending]
        for node in certain:
            node.pending = None
        pending.nodes = []
        if self._journal is not None:
            for node in sorted(certain, key=lambda node: node.end):  # a prefix before what follows on it
                self._record(node)
        return certain

    def discard(self, pending: InFlightNodes) -> None:
        """Removes the nodes of a step that has failed, and all nodes below them."""
        nodes, pending.nodes = pending.nodes, []
        for node in nodes:
            if node.pending is pending:
                self._forget(node)

    def _await(self, node: Node, pending: InFlightNodes | None) -> None:
        if pending is not None and node.pending is None:
            node.pending = pending
            pending.nodes.append(node)

    def _record(self, node: Node) -> None:
        """Tells the journal of a node that requests can use now."""
        if self._journal is not None and node.pending is None and node.blocks is not None:
            self._journal.stored(node)

    def _forget(self, node: Node) -> None:
        """Drops the blocks and snapshots of a node and of all nodes below it."""
        for child in list(node.children.values()):
            self._forget(child)
        self._drop_slot(node)
        if node.blocks is not None:
            self._leaves.remove(node)
            self._drop_blocks(node)
        self.prune(node)

    def ensure_node(self, namespace: Namespace, tokens: bytes) -> Node:
        """Node at the end of a prefix, made if there is none."""
        node, end = self.tree.root(namespace), len(tokens) // TOKEN_BYTES
        while node.end < end:
            node, rest = self.tree.descend(node, tokens)
            if rest is not None and rest.blocks is not None:
                self._share_blocks(node, rest, rest.blocks)
                if self._journal is not None:
                    self._journal.split(node, rest)
                self._await(node, rest.pending)
        return node

    # Eviction.

    def evict_slot(self) -> bool:
        """Evicts the snapshot of the lowest priority and the blocks that only it needed; False: there is none."""
        node = self._snapshots.pop_least(self._clock())
        if node is None:
            return False
        self._drop_slot(node)
        self.evicted_bytes += self._sizes.slot
        self.prune(node)
        return True

    def evict_blocks(self) -> bool:
        """Evicts the blocks of the leaf of the lowest priority; False: there is none."""
        node = self._leaves.pop_least(self._clock())
        if node is None:
            return False
        self.evicted_bytes += self._size(node)
        self._drop_slot(node)
        self._drop_blocks(node)
        self.prune(node)
        return True

    def drop(self, node: Node) -> None:
        """Drops a node's blocks and snapshot, unless it is pinned or a node below it has blocks."""
        if node.pins or any(child.blocks is not None for child in node.children.values()):
            return
        self._forget(node)

    def clear(self) -> None:
        """Evicts everything that no step in flight reads."""
        while self.evict_blocks():
            pass

    def prune(self, node: Node) -> None:
        """Removes a node that has no use any more, and the nodes above that were only needed for it."""
        while node.parent is not None and not node.pins:
            if node.children or node.slot or node.key is not None or node.saving:
                break
            if node.blocks is not None:
                self._leaves.remove(node)
                self._drop_blocks(node)
            node = self.tree.remove(node)

    # Integrity check.

    def held_blocks(self) -> Iterator[int]:
        """Every cached block, once for each node that has it."""
        for node in self.tree:
            if not (node.children or node.slot or node.key is not None or node.saving or node.pins):
                raise IntegrityError(f"a node that ends at {node.end} has no use, but was not removed")
            if node.blocks is None:
                if node.slot or any(child.blocks is not None for child in node.children.values()):
                    raise IntegrityError(f"a node that ends at {node.end} lacks its KV")
                continue
            if len(node.blocks) != self._count(node.start, node.end):
                raise IntegrityError(f"a node from {node.start} to {node.end} has {len(node.blocks)} blocks")
            leaf = all(child.blocks is None for child in node.children.values())
            if leaf != (node in self._leaves):
                raise IntegrityError(f"a node that ends at {node.end} is wrongly listed as a leaf, or not")
            yield from node.blocks

    def held_slots(self) -> Iterator[int]:
        """Slot of every snapshot."""
        for node in self.tree:
            if (node.slot > 0) != (node in self._snapshots):
                raise IntegrityError("the queue of snapshots differs from the nodes that have a slot")
            if node.slot:
                yield node.slot

    # Single nodes.

    def _count(self, start: int, end: int) -> int:
        return -(-end // self._block_size) - start // self._block_size

    def _size(self, node: Node) -> int:
        return self._sizes.block * len(node.blocks or ()) + (self._sizes.slot if node.slot else 0)

    def _price(self, node: Node) -> float:
        """Seconds to get a node's snapshot back: computed from the snapshot above it, or loaded."""
        above = node.parent
        while above is not None and not above.slot:
            above = above.parent
        computing = self._cost.seconds(0 if above is None else above.end, node.end)
        loading = self._reload_seconds(node)
        return computing if loading is None else min(computing, loading)

    def _hold(self, node: Node) -> None:
        for queue in (self._snapshots, self._leaves):
            if node in queue:
                queue.hold(node, node.pins > 0)

    def _fill(self, node: Node, blocks: Sequence[int]) -> None:
        """Gives a node its blocks."""
        first = node.start // self._block_size
        node.blocks = list(blocks[first : first + self._count(node.start, node.end)])
        for block in node.blocks:
            self._blocks.cache(block)
        if node.parent is not None:
            self._leaves.remove(node.parent)
        self._list_leaf(node)

    def _list_leaf(self, node: Node) -> None:
        """Adds a node to the leaves if it is one."""
        if node.parent is None or node.blocks is None or any(c.blocks is not None for c in node.children.values()):
            return
        uses = self._snapshots.uses(node) if node.slot else 1
        self._leaves.add(node, self._price(node), self._size(node), uses=uses)
        if node in self._kept:
            self._leaves.pin(node, self._kept[node])
        self._hold(node)

    def _share_blocks(self, upper: Node, lower: Node, blocks: list[int]) -> None:
        """Divides the blocks of a node that was split; the block that the split lies in belongs to both."""
        first = upper.start // self._block_size
        upper.blocks = blocks[: self._count(upper.start, upper.end)]
        lower.blocks = blocks[lower.start // self._block_size - first :]
        if lower.start % self._block_size:
            self._blocks.cache(lower.blocks[0])
        if lower in self._leaves:
            self._leaves.update(lower, self._price(lower), self._size(lower))

    def _drop_slot(self, node: Node) -> None:
        if node.slot:
            self._snapshots.remove(node)
            self._kept.pop(node, None)
            self._slots.release(node.slot)
            node.slot = 0
            if self._journal is not None:
                self._journal.snapshot_removed(node)
            if node in self._leaves:
                self._leaves.update(node, self._price(node), self._size(node))

    def _drop_blocks(self, node: Node) -> None:
        for block in node.blocks or ():
            self._blocks.uncache(block)
        if self._journal is not None:
            self._journal.removed(node)
        node.blocks = None
        node.pending = None
        if node.parent is not None:
            self._list_leaf(node.parent)
