"""Reuse of computed histories: which of them have their KV and, at some places, their state on the device or in a tier.

A hit needs both, so it reaches to the deepest snapshot whose KV is there, at whatever token that is: blocks are shared
as they are, and of the last one, where the snapshot ends inside of it, the sequence that goes on gets a copy.
The KV of a node is on the device only if that of all nodes above is. Nodes that nothing below or in them makes useful,
neither a snapshot nor an entry of a tier, are removed.

What is evicted first is what saves the least time a byte (see EvictionQueue): of snapshots their slot, of leaves their
blocks. Both only forget, so that nothing waits for an eviction; what is to outlive the device is copied to the tiers
before.

Nodes are found by the tokens themselves, and histories kept apart by a hash of adapter digest and cache salt (160 bits
of BLAKE2b): no other policy's KV is ever taken for a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.engine.kv_cache.block_pool import BlockPool, IntegrityError
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.eviction import EvictionQueue
from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace
from services.engine.kv_cache.radix_tree import InFlightNodes, Node, PrefixMatch, RadixTree
from services.engine.kv_cache.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what the device holds, bytes."""

    block: int = 1
    slot: int = 1


class PrefixCache:
    """Owns the references of its nodes to blocks, and the slots of all snapshots. Not thread-safe.

    Args:
        cost: what computing takes.
        useful: whether a tier makes a node useful that has no snapshot on the device.
        reload_seconds: seconds to get a snapshot back from a tier; None: no tier has it.
        clock: monotonic seconds.
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
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._block_size = block_size
        self._sizes = sizes
        self._cost = cost
        self._clock = clock
        self._reload_seconds = reload_seconds
        self.tree = RadixTree()
        self._snapshots: EvictionQueue[Node] = EvictionQueue()
        """Nodes with a slot."""
        self._leaves: EvictionQueue[Node] = EvictionQueue()
        """Nodes with blocks, below which no node has any."""
        self._kept: dict[Node, float] = {}
        """Until when their snapshots go only when nothing else is left."""
        self.evicted_bytes = 0
        """Since the start."""

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # Looking up.

    def hit(self, path: PrefixMatch, limit: int, unit: int) -> Node | None:
        """The deepest node of a path to go on from at once, that ends at a multiple of ``unit`` up to ``limit``."""
        found: Node | None = None
        for node in path.nodes:
            if node.end > limit or node.blocks is None or node.pending is not None:
                break
            if node.slot and node.end % unit == 0:
                found = node
        return found

    def resident(self, path: PrefixMatch) -> int:
        """How many nodes of a path have their KV on the device."""
        return next((at for at, node in enumerate(path.nodes) if node.blocks is None), len(path.nodes))

    def block_table(self, nodes: Sequence[Node]) -> list[int]:
        """The blocks of a history up to the end of the last of these nodes, a path from behind the root."""
        table: list[int] = []
        for node in nodes:
            if node.blocks is None:
                raise IntegrityError("a path without its KV is taken for a hit")
            # Where a node begins inside of a block, its own copy of that block has the tokens before it, too.
            del table[node.start // self._block_size :]
            table += node.blocks
        return table

    def prefix_bytes(self, node: Node) -> int:
        """What the device has of a history up to this node: its blocks, and the snapshot at its end."""
        blocks = sum(len(each.blocks or ()) for each in node.path())
        return self._sizes.block * blocks + (self._sizes.slot if node.slot else 0)

    # Using.

    def pin(self, node: Node) -> None:
        """Keeps what a node holds from eviction while a step or a copy reads it."""
        node.pins += 1
        self._hold(node)

    def unpin(self, node: Node) -> None:
        if node.pins < 1:
            raise IntegrityError("a node is unpinned that is not pinned")
        node.pins -= 1
        self._hold(node)
        self.prune(node)

    def touch(self, node: Node) -> None:
        """A history goes on from its snapshot."""
        for queue in (self._snapshots, self._leaves):
            if node in queue:
                queue.touch(node)

    def keep(self, node: Node, until: float) -> None:
        """What it holds goes only when nothing else is left, until a time on the clock; 0: no longer."""
        for queue in (self._snapshots, self._leaves):
            if node in queue:
                queue.pin(node, until)
        if until and node.slot:
            self._kept[node] = until
        else:
            self._kept.pop(node, None)

    # Adding.

    def insert(
        self,
        namespace: Namespace,
        tokens: bytes,
        blocks: Sequence[int],
        slot: int,
        pending: InFlightNodes | None = None,
    ) -> Node:
        """Adds a computed history and the snapshot behind it; the cache owns ``slot`` from here on.

        Args:
            blocks: its KV from the first token on, held by the caller. Where the device has it already, the cache keeps
                its own.
            pending: of the step in flight that computes the last of it; None: all of it is there.
        """
        node = self.ensure_node(namespace, tokens)
        for each in node.path():
            if each.blocks is None:
                self._fill(each, blocks)
                self._await(each, pending)
        if node.slot:
            self._slots.release(slot)
            return node
        node.slot = slot
        self._await(node, pending)
        self._snapshots.add(node, self._price(node), self._sizes.slot)
        if node in self._leaves:
            self._leaves.update(node, self._price(node), self._size(node))
        self._hold(node)
        return node

    def confirm(self, pending: InFlightNodes) -> list[Node]:
        """The step has run. Returns the nodes, new or with a new snapshot, that are certain now."""
        certain = [node for node in pending.nodes if node.pending is pending]
        for node in certain:
            node.pending = None
        pending.nodes = []
        return certain

    def discard(self, pending: InFlightNodes) -> None:
        """The step has failed: forgets what it should have computed, and all that was computed behind it."""
        nodes, pending.nodes = pending.nodes, []
        for node in nodes:
            if node.pending is pending:
                self._forget(node)

    def _await(self, node: Node, pending: InFlightNodes | None) -> None:
        if pending is not None and node.pending is None:
            node.pending = pending
            pending.nodes.append(node)

    def _forget(self, node: Node) -> None:
        """Drops what the device has of a node and below."""
        for child in list(node.children.values()):
            self._forget(child)
        self._drop_slot(node)
        if node.blocks is not None:
            self._leaves.remove(node)
            self._drop_blocks(node)
        self.prune(node)

    def ensure_node(self, namespace: Namespace, tokens: bytes) -> Node:
        """The node of a history, made if there is none."""
        node, end = self.tree.root(namespace), len(tokens) // TOKEN_BYTES
        while node.end < end:
            node, rest = self.tree.descend(node, tokens)
            if rest is not None and rest.blocks is not None:
                self._share_blocks(node, rest, rest.blocks)
                self._await(node, rest.pending)
        return node

    # Giving up.

    def evict_slot(self) -> bool:
        """Gives up the snapshot that is worth the least, and the blocks that only it made useful; False: there is
        none."""
        node = self._snapshots.pop_least(self._clock())
        if node is None:
            return False
        self._drop_slot(node)
        self.evicted_bytes += self._sizes.slot
        self.prune(node)
        return True

    def evict_blocks(self) -> bool:
        """Gives up the leaf that is worth the least and its blocks; False if there is none."""
        node = self._leaves.pop_least(self._clock())
        if node is None:
            return False
        self.evicted_bytes += self._size(node)
        self._drop_slot(node)
        self._drop_blocks(node)
        self.prune(node)
        return True

    def drop(self, node: Node) -> None:
        """Gives up what the device has of a node, unless somebody reads it or something on the device stands on it."""
        if node.pins or any(child.blocks is not None for child in node.children.values()):
            return
        self._forget(node)

    def clear(self) -> None:
        """Gives up all that no step in flight reads."""
        while self.evict_blocks():
            pass

    def prune(self, node: Node) -> None:
        """Removes a node that is of no use, and those above that were of use only for it."""
        while node.parent is not None and not node.pins:
            if node.children or node.slot or node.key is not None or node.saving:
                break
            if node.blocks is not None:
                self._leaves.remove(node)
                self._drop_blocks(node)
            node = self.tree.remove(node)

    # For the integrity check.

    def held_blocks(self) -> Iterator[int]:
        """Every cached block, once for each node that it is in."""
        for node in self.tree:
            if not (node.children or node.slot or node.key is not None or node.saving or node.pins):
                raise IntegrityError(f"a node that ends at {node.end} is of no use")
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
        """Every snapshot's slot."""
        for node in self.tree:
            if (node.slot > 0) != (node in self._snapshots):
                raise IntegrityError("a snapshot is not listed, or one without a slot is")
            if node.slot:
                yield node.slot

    # Books of single nodes.

    def _count(self, start: int, end: int) -> int:
        return -(-end // self._block_size) - start // self._block_size

    def _size(self, node: Node) -> int:
        return self._sizes.block * len(node.blocks or ()) + (self._sizes.slot if node.slot else 0)

    def _price(self, node: Node) -> float:
        """Seconds to have a node's snapshot again: to compute from the one above it, or to load it."""
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
        """The device has its KV from now on."""
        first = node.start // self._block_size
        node.blocks = list(blocks[first : first + self._count(node.start, node.end)])
        for block in node.blocks:
            self._blocks.cache(block)
        if node.parent is not None:
            self._leaves.remove(node.parent)
        self._list_leaf(node)

    def _list_leaf(self, node: Node) -> None:
        """Lists it if it is one."""
        if node.parent is None or node.blocks is None or any(c.blocks is not None for c in node.children.values()):
            return
        uses = self._snapshots.uses(node) if node.slot else 1
        self._leaves.add(node, self._price(node), self._size(node), uses=uses)
        if node in self._kept:
            self._leaves.pin(node, self._kept[node])
        self._hold(node)

    def _share_blocks(self, upper: Node, lower: Node, blocks: list[int]) -> None:
        """Divides the blocks of a node that has been cut in two; one that both have a part of is in both."""
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
            if node in self._leaves:
                self._leaves.update(node, self._price(node), self._size(node))

    def _drop_blocks(self, node: Node) -> None:
        for block in node.blocks or ():
            self._blocks.uncache(block)
        node.blocks = None
        node.pending = None
        if node.parent is not None:
            self._list_leaf(node.parent)
