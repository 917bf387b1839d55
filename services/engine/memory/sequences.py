"""Blocks, slots and cached prefixes of sequences: the one place that gives memory to them and takes it back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.limits import SchedulerConfig
from services.engine.memory.blocks import BlockPool
from services.engine.memory.prefix import Node, PrefixCache
from services.engine.memory.slots import SlotPool
from services.engine.plan import StateCopy
from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Restore:
    """A prefix hit: the snapshot to copy into the sequence's slot, pinned until that has happened."""

    node: Node
    copy: StateCopy


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot to copy a sequence's state to once it has computed the first ``position`` tokens of its prompt."""

    sequence: Sequence
    position: int
    slot: int
    blocks: list[int]
    """The sequence's live list: it has another one as soon as it ends or is preempted, and these are not its own."""


class SequenceMemory:
    """What live sequences hold, and what is kept of their prompts. Live ones take precedence over what is kept."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._caching = config.prefix_cache
        self._unit = math.lcm(config.block_size, config.prefill_alignment)
        """Snapshots are taken at multiples of it."""
        self._least_tail = config.least_tail
        self._speculative = config.speculative
        self._blocks = BlockPool(config.num_blocks)
        self._slots = SlotPool(config.num_slots)
        self._cache = PrefixCache(self._blocks, self._slots, config.block_size)

    @property
    def blocks(self) -> BlockPool:
        """For counting."""
        return self._blocks

    @property
    def num_slots(self) -> int:
        return self._slots.total

    @property
    def num_snapshots(self) -> int:
        return self._cache.num_snapshots

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def could_hold(self, tokens: int) -> bool:
        """Whether the blocks are there, if cached ones are given up."""
        return self.blocks_for(tokens) <= self._blocks.free + self._blocks.idle

    def boundary(self, sequence: Sequence) -> int:
        """Where to take a snapshot of a prompt, and the most of it that may come from one: its last block boundary that
        leaves something to compute, and all rows that are to be read; 0 for prompts too short to be worth a split."""
        length = len(sequence.request.prompt_token_ids)
        if not self._caching or length < 2 * self._block_size:
            return 0
        end = length - self._least_tail
        if sequence.reading is not None:
            end = min(end, sequence.reading.reusable)
        return end // self._unit * self._unit

    def start(self, sequence: Sequence, spare_blocks: int, *, last_resort: bool) -> tuple[bool, Restore | None]:
        """Gives a sequence a slot and the blocks of all its known tokens, those of a cached prefix first.

        Args:
            spare_blocks: how many must stay free beyond that.
            last_resort: nothing else runs: even the snapshot that would be hit may give way.

        Returns:
            Whether there was enough, and the prefix hit, if any.
        """
        prompt, boundary = sequence.request.prompt_token_ids, self.boundary(sequence)
        match = self._cache.match(sequence.namespace, prompt, boundary)
        source = 0
        if match.node is not None:
            # Held before anything is evicted to make room.
            source = self._cache.pin(match.node)
            self._blocks.share(match.blocks)
        needed = self.blocks_for(sequence.known) - len(match.blocks)
        slot = self._take_slot() if self._reserve(needed + spare_blocks) else None
        if slot is None:
            if match.node is not None:
                self._cache.unpin(match.node)
                self._blocks.release(match.blocks)
            if last_resort and not self._slots.free and self._cache.evict_slot():
                return self.start(sequence, spare_blocks, last_resort=True)
            return False, None
        sequence.slot = slot
        if self._speculative and sequence.guessable:
            sequence.spare_slot = self._take_slot() or 0
        sequence.blocks = [*match.blocks, *self._blocks.take(needed)]
        sequence.computed = len(match.blocks) * self._block_size
        branch = match.shared_blocks * self._block_size // self._unit * self._unit
        sequence.splits = tuple(sorted({split for split in (branch, boundary) if split > sequence.computed}))
        return True, None if match.node is None else Restore(match.node, StateCopy(source, slot))

    def grow(self, sequence: Sequence) -> bool:
        """Gives a sequence the block of its newest token, if it lacks it; False if there is none."""
        return self._grow(sequence, sequence.known)

    def grow_for_guess(self, sequence: Sequence) -> bool:
        """Same, for a guess behind it."""
        return self._grow(sequence, sequence.known + 1)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        if tokens <= len(sequence.blocks) * self._block_size:
            return True
        if not self._reserve(1):
            return False
        sequence.blocks += self._blocks.take(1)
        return True

    def free(self, sequence: Sequence) -> None:
        """Takes everything back."""
        self._blocks.release(sequence.blocks)
        for slot in (sequence.slot, sequence.spare_slot):
            if slot:
                self._slots.release(slot)
        # A plan in flight may still look at the old list.
        sequence.blocks = []
        sequence.slot = sequence.spare_slot = 0
        sequence.guess = -1
        sequence.computed = 0

    def restored(self, restore: Restore) -> None:
        """The copy has been made, or never will be."""
        self._cache.unpin(restore.node)

    def begin_snapshot(self, sequence: Sequence, position: int) -> Snapshot | None:
        """A slot for a snapshot; None if there is one of this prefix already or live sequences need all slots."""
        match = self._cache.match(sequence.namespace, sequence.request.prompt_token_ids, position)
        if len(match.blocks) * self._block_size == position:
            return None
        slot = self._take_slot()
        return None if slot is None else Snapshot(sequence, position, slot, sequence.blocks)

    def end_snapshot(self, snapshot: Snapshot, *, taken: bool) -> None:
        """Adds the prefix to the cache, or gives the slot back if the step failed or the blocks are gone."""
        sequence = snapshot.sequence
        if not taken or sequence.blocks is not snapshot.blocks:
            self._slots.release(snapshot.slot)
            return
        tokens = sequence.request.prompt_token_ids[: snapshot.position]
        blocks = snapshot.blocks[: snapshot.position // self._block_size]
        self._cache.insert(sequence.namespace, tokens, blocks, snapshot.slot)

    def clear_cache(self) -> None:
        self._cache.clear()

    def check(self, sequences: Iterable[Sequence], snapshots: Iterable[Snapshot]) -> None:
        """Compares the books with what running sequences and snapshots under way hold.

        Raises:
            IntegrityError: something is leaked, shared or lost.
        """
        running = list(sequences)
        self._blocks.check((block for sequence in running for block in sequence.blocks), self._cache.held_blocks())
        slots = [slot for sequence in running for slot in (sequence.slot, sequence.spare_slot) if slot]
        slots += [snapshot.slot for snapshot in snapshots]
        self._slots.check([*slots, *self._cache.held_slots()])

    def _reserve(self, count: int) -> bool:
        """Whether ``count`` blocks are free, after giving up cached ones if that is what it takes."""
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
