"""Memory of sequences: the one place that allocates and frees their blocks and state slots, with prefix hits."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.kv_cache.cache_journal import CacheJournal
from services.engine.kv_cache.compute_cost import ComputeCost
from services.engine.kv_cache.keys import TOKEN_BYTES
from services.engine.kv_cache.prefix_cache import PrefixCache, Sizes
from services.engine.kv_cache.radix_tree import InFlightNodes, Node, PrefixMatch
from services.engine.kv_cache.snapshot_policy import SnapshotPolicy, interval
from services.engine.kv_cache.state_pool import StatePool
from services.engine.kv_offload.connector import OffloadConnector
from services.engine.kv_offload.messages import TierCommand, TierEvent
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.step_plan import FIRST_SNAPSHOT, BlockCopy, StateCopy

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager


class Allocation(enum.Enum):
    """Result of allocating the memory of a sequence."""

    GRANTED = enum.auto()
    """The sequence has its memory."""
    NO_MEMORY = enum.auto()
    """Too little memory is free."""
    LOADING = enum.auto()
    """The state to resume from is being loaded from a tier."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Copies for a prefix hit into the sequence's own slot and block. Their sources are held until the copies are
    made."""

    node: Node
    state: StateCopy
    block: BlockCopy | None
    """Copy of the block that the snapshot ends inside; None: it is at the end of a block."""
    held: SequenceABC[int]
    """Source blocks that the sequence does not share."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot to take: the slot that gets a sequence's state behind the first ``position`` tokens of its prompt."""

    sequence: Sequence
    position: int
    node: Node
    slot: int


class SequenceMemory:
    """Memory of live sequences and the prefix cache of their tokens. Live sequences take precedence over the cache.

    Args:
        tiers: offload below the device; None: there is none.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float], tiers: TierManager | None = None) -> None:
        self._block_size = config.block_size
        self._caching = config.prefix_cache
        self._unit = config.prefill_alignment
        self._least_tail = config.least_tail
        self._clock = clock
        self.cost = ComputeCost(config.token_seconds, config.attention_cost)
        self._blocks = BlockPool(config.num_blocks)
        self._slots = StatePool(config.num_slots)
        sizes = Sizes(config.block_bytes, config.slot_bytes)
        self.journal = CacheJournal() if config.cache_journal else None
        """Journal of the prefix cache's changes; None: nobody follows them."""
        self._cache = PrefixCache(
            self._blocks, self._slots, config.block_size, sizes, self.cost, clock, self._reload_seconds, self.journal
        )
        self.offload: OffloadConnector | None = None
        if tiers is not None:
            self.offload = OffloadConnector(
                self._cache, self._blocks, self._slots, tiers, self.cost, share=config.load_share
            )
        self._policy = SnapshotPolicy(
            unit=self._unit,
            gap=math.lcm(self._unit, max(config.block_size, FIRST_SNAPSHOT)),
            interval=config.snapshot_interval or interval(config.slot_bytes, config.block_bytes / config.block_size),
        )

    @property
    def blocks(self) -> BlockPool:
        """Block pool, for counts."""
        return self._blocks

    @property
    def cache(self) -> PrefixCache:
        """Prefix cache, for conversation sessions."""
        return self._cache

    @property
    def num_slots(self) -> int:
        return self._slots.total

    @property
    def num_snapshots(self) -> int:
        return self._cache.num_snapshots

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def could_hold(self, tokens: int, spare_blocks: int) -> bool:
        """True if a sequence of so many tokens would find its blocks, with ``spare_blocks`` left free, after evicting
        cached ones and without any prefix hit."""
        # One more for the block that a prefix ends inside, which is held until it has been copied.
        return self.blocks_for(tokens) + 1 + spare_blocks <= self._blocks.free + self._blocks.idle

    def reusable(self, sequence: Sequence) -> int:
        """Most tokens of a sequence that may come from the cache: something is left to compute, and so are all rows to
        be read."""
        if not self._caching:
            return 0
        end = max(0, sequence.known - self._least_tail)
        return end if sequence.reading is None else min(end, sequence.reading.reusable)

    def matched(self, sequence: Sequence, limit: int) -> int:
        """Tokens of a waiting sequence that the device's prefix cache has now."""
        node = None if limit == 0 else self._cache.hit(self._find(sequence), limit, self._unit)
        return 0 if node is None else node.end

    def _find(self, sequence: Sequence) -> PrefixMatch:
        """Match of a waiting sequence with the prefix cache; only what has changed since the last call is compared."""
        sequence.prefix_match = self._cache.tree.find(sequence.namespace, sequence.all_tokens(), sequence.prefix_match)
        return sequence.prefix_match

    def start(
        self, sequence: Sequence, spare_blocks: int, shared: Iterable[int], *, last_resort: bool
    ) -> tuple[Allocation, Restore | None]:
        """Gives a sequence a slot and the blocks of all its known tokens, those of a cached prefix first.

        Args:
            spare_blocks: blocks that must stay free beyond that.
            shared: positions of its prompt at which other requests branch off; see SnapshotPolicy.
            last_resort: nothing else runs, so even the cached prefix may be evicted.

        Returns:
            Whether there was enough memory, and the copies of the prefix hit, if any.
        """
        limit = self.reusable(sequence)
        self._cache.tree.name(sequence.namespace)
        path = PrefixMatch() if limit == 0 else self._find(sequence)
        return self._start(sequence, path, limit, spare_blocks, shared, last_resort=last_resort)

    def _start(
        self,
        sequence: Sequence,
        path: PrefixMatch,
        limit: int,
        spare_blocks: int,
        shared: Iterable[int],
        *,
        last_resort: bool,
    ) -> tuple[Allocation, Restore | None]:
        """See start(); ``path`` is the match with the prefix cache."""
        node = self._cache.hit(path, limit, self._unit)
        table: list[int] = []
        if node is not None:
            # Held before anything is evicted to make room.
            table = self._cache.block_table(path.nodes[: path.nodes.index(node) + 1])
            self._cache.pin(node)
            self._blocks.share(table)
        whole = 0 if node is None else node.end // self._block_size
        needed = self.blocks_for(sequence.known) - whole
        load_pending = self._waits_for_load(sequence, path, node, limit)
        slot = None
        if not load_pending and self._reserve(needed + spare_blocks):
            slot = self._take_slot()
        if slot is None:
            if node is not None:
                self._blocks.release(table)
                self._cache.unpin(node)
            if load_pending:
                return Allocation.LOADING, None
            if last_resort and node is not None:
                return self._start(sequence, PrefixMatch(), limit, spare_blocks, shared, last_resort=False)
            return Allocation.NO_MEMORY, None
        sequence.slot = slot
        sequence.prefix_match = None
        sequence.blocks = [*table[:whole], *self._blocks.take(needed)]
        sequence.computed = 0 if node is None else node.end
        sequence.snapshot_positions = self._snapshot_positions(sequence, path, limit, shared)
        if node is None:
            return Allocation.GRANTED, None
        self._cache.touch(node)
        if self.offload is not None:
            self.offload.used(node)
        block = BlockCopy(table[whole], sequence.blocks[whole]) if table[whole:] else None
        return Allocation.GRANTED, Restore(node, StateCopy(node.slot, slot), block, table[whole:])

    def _snapshot_positions(
        self, sequence: Sequence, path: PrefixMatch, limit: int, shared: Iterable[int]
    ) -> tuple[int, ...]:
        """Positions in the prompt at which to save the state."""
        last = min(limit, len(sequence.request.prompt_token_ids) - self._least_tail)
        if last < 2 * self._block_size:
            return ()
        # Where it diverges from another prefix, later ones may as well.
        branch = (path.matched,) if path.matched > sequence.computed else ()
        return self._policy.positions(sequence.computed, last, (*shared, *branch), sequence.request.boundaries)

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence the blocks of its newest token, wherever it may be; False: there are too few."""
        return self.covers(sequence, min(sequence.known + sequence.uncertain, sequence.known_at_end - 1))

    def covers(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a sequence the blocks of so many tokens, unless it has them; False: there are too few."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if not self._reserve(missing):
            return False
        sequence.blocks += self._blocks.take(missing)
        return True

    def room(self, sequence: Sequence) -> int:
        """Number of tokens that a sequence's blocks have room for behind all that may be computed."""
        return len(sequence.blocks) * self._block_size - sequence.computed - sequence.uncertain

    def free(self, sequence: Sequence, pending: InFlightNodes | None, *, keep: bool) -> Node | None:
        """Frees the memory of a sequence.

        Args:
            pending: nodes of the youngest step in flight; None: there is none.
            keep: whether the prefix cache keeps what it has computed; its slot becomes a snapshot, without a copy.

        Returns:
            Node of that snapshot; None: there is none.
        """
        node = None
        tokens_so_far = sequence.all_tokens()
        computed = sequence.computed_at_end() if keep else None
        # States behind answers were computed token by token, not in tiles: their bits differ, so an exact cache drops
        # them.
        least = 1 if sequence.request.session is not None else 2 * self._block_size
        worthwhile = self._caching and self._unit == 1 and sequence.request.pooling is None
        known = computed is not None and least <= computed and computed * TOKEN_BYTES <= len(tokens_so_far)
        if computed is not None and known and worthwhile and sequence.slot:
            tokens = tokens_so_far[: computed * TOKEN_BYTES]
            node = self._cache.insert(sequence.namespace, tokens, sequence.blocks, sequence.slot, pending)
            node.transient = sequence.request.sampling.forces
            sequence.slot = 0
            if pending is None:
                self.confirmed(node)
        self._blocks.release(sequence.blocks)
        if sequence.slot:
            self._slots.release(sequence.slot)
        # A plan in flight may still look at the old list.
        sequence.blocks = []
        sequence.slot = sequence.computed = 0
        sequence.drawn = sequence.uncertain = 0
        return node

    def restored(self, restore: Restore) -> None:
        """Releases the sources of a restore whose copies have been made, or never will be."""
        self._blocks.release(restore.held)
        self._cache.unpin(restore.node)

    def begin_snapshot(self, sequence: Sequence, position: int, pending: InFlightNodes) -> Snapshot | None:
        """Begins a snapshot; None: this prefix has one already, or live sequences need all slots."""
        tokens = sequence.prompt[: position * TOKEN_BYTES]
        path = self._cache.tree.find(sequence.namespace, tokens)
        if path.nodes and path.nodes[-1].end == position and path.nodes[-1].slot:
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        node = self._cache.insert(sequence.namespace, tokens, sequence.blocks, slot, pending)
        node.transient = sequence.request.sampling.forces
        # Pinned until the step that writes it has landed.
        self._cache.pin(node)
        return Snapshot(sequence, position, node, slot)

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """Ends a snapshot: the step that writes it is no longer in flight."""
        self._cache.unpin(snapshot.node)

    def confirm(self, pending: InFlightNodes) -> None:
        """Confirms the nodes of a step that has run: they can be used now."""
        for node in self._cache.confirm(pending):
            self.confirmed(node)

    def confirmed(self, node: Node) -> None:
        """Offers a snapshot that can be used now to the tiers."""
        if self.offload is not None:
            self.offload.offer(node)

    def discard(self, pending: InFlightNodes) -> None:
        """Discards the nodes of a step that has failed."""
        self._cache.discard(pending)

    def clear_cache(self) -> None:
        self._cache.clear()

    def check(self, sequences: Iterable[Sequence], restores: Iterable[Restore]) -> None:
        """Compares the pools with what running sequences and restores in progress hold.

        Raises:
            IntegrityError: something is leaked, shared or lost.
        """
        running = list(sequences)
        held = [block for sequence in running for block in sequence.blocks]
        held += [block for restore in restores for block in restore.held]
        slots = [sequence.slot for sequence in running]
        copied: list[int] = []
        if self.offload is not None:
            copied += self.offload.held_blocks()
            slots += self.offload.held_slots()
            self.offload.check()
        self._blocks.check(held, self._cache.held_blocks(), copied)
        self._slots.check([*slots, *self._cache.held_slots()])

    # Tiers.

    def take_commands(self) -> list[TierCommand]:
        """Commands for the tiers, to be submitted when all steps planned so far have been launched."""
        return [] if self.offload is None else self.offload.take_commands()

    def take_events(self, events: SequenceABC[TierEvent]) -> list[Node]:
        """Takes events of the tiers; returns the nodes that have a new copy."""
        return [] if self.offload is None else self.offload.take_events(events)

    @property
    def copying(self) -> bool:
        """True while a load or a save is in progress."""
        return self.offload is not None and self.offload.copying

    def is_loading(self, load_id: int) -> bool:
        return self.offload is not None and self.offload.is_loading(load_id)

    def _waits_for_load(self, sequence: Sequence, path: PrefixMatch, hit: Node | None, limit: int) -> bool:
        """True if a sequence waits for a load from a tier; begins the load if it is worth it."""
        if self.offload is None or sequence.load_tried or not path.nodes:
            return False
        wanted = self.offload.find_load(path, hit, limit, self._unit)
        if wanted is None:
            return False
        sequence.load_tried = True
        load_id = self.offload.load_of(wanted.node)
        if not load_id:
            slot = self._take_slot()
            if slot is None:
                return False
            load_id = self.offload.load(path, wanted, self._take_blocks, slot)
            if not load_id:
                self._slots.release(slot)
                return False
        sequence.load_id, sequence.load_tier, sequence.loaded_tokens = load_id, wanted.tier, wanted.node.end
        sequence.load_patience = wanted.patience
        return True

    def give_up(self, load_id: int) -> None:
        """Gives up a load that nobody waits for any more."""
        if self.offload is not None:
            self.offload.give_up(load_id)

    def _take_blocks(self, count: int) -> list[int] | None:
        return self._blocks.take(count) if self._reserve(count) else None

    def _reload_seconds(self, node: Node) -> float | None:
        return None if self.offload is None else self.offload.reload_seconds(node)

    def _reserve(self, count: int) -> bool:
        """Evicts cached blocks until ``count`` are free; False: there are not as many."""
        if count > self._blocks.free + self._blocks.idle:
            return False
        while self._blocks.free < count:
            if not self._cache.evict_blocks():
                return False
        return True

    def _take_slot(self) -> int | None:
        slot = self._slots.take()
        if slot is None and self._cache.evict_slot():
            slot = self._slots.take()
        return slot
