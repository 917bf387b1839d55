"""Admission: which waiting sequences get a seat and memory, and in which order. No torch here.

Ranks never change. A sequence of worse rank may overtake a waiting one only until that one is first refused a seat (one
of ``max_num_seqs``) or memory, which sets ``held_up``. From then on nobody of worse rank passes it. Running sequences
end and give back what they hold, so every waiting sequence starts in the end, whatever arrives meanwhile.
"""

from __future__ import annotations

import enum
from itertools import takewhile

from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.pending_prefixes import PendingPrefixes
from services.engine.scheduler.request_queue import RequestQueue
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import Allocation, SequenceMemory
from services.engine.scheduler.step_builder import StepBuilder

_LOOK_AHEAD = 64
"""Waiting sequences that are searched for short ones."""


class Admission(enum.Enum):
    """Result of an attempt to admit a waiting sequence."""

    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    """The sequence waits for a state that another one computes or a tier loads; others may start."""
    BLOCKED = enum.auto()
    """The sequence finds no seat or memory; nobody behind it may start either."""


class Admissions:
    """Gives seats and memory to waiting sequences. Moves them in ``queue`` when they start."""

    def __init__(
        self, config: SchedulerConfig, memory: SequenceMemory, queue: RequestQueue, prefixes: PendingPrefixes
    ) -> None:
        self._config = config
        self._memory = memory
        self._queue = queue
        self._prefixes = prefixes

    @property
    def has_seat(self) -> bool:
        return len(self._queue.running) < self._config.max_num_seqs

    def has_room(self, sequence: Sequence) -> bool:
        """True if a waiting sequence would find a seat and its memory now, without any prefix hit."""
        return self.has_seat and self._memory.could_hold(sequence.known, self._headroom)

    def overtaking(self, partial: list[Sequence]) -> tuple[list[Sequence], int]:
        """Short sequences, best rank first, and the number of long ones that they would overtake. A short one does not
        overtake a long one of better priority.

        Args:
            partial: running sequences with more than one token to compute.
        """
        waiting: list[Sequence] = []
        if self.has_seat:
            waiting = list(takewhile(lambda sequence: not sequence.held_up, self._queue.waiting[:_LOOK_AHEAD]))
        short: list[Sequence] = []
        long: list[Sequence] = []
        for sequence in sorted([*partial, *waiting], key=lambda sequence: sequence.rank):
            (short if self._is_short(sequence) else long).append(sequence)
        if not long:
            return [], 0
        return [sequence for sequence in short if sequence.request.priority <= long[0].request.priority], len(long)

    def _is_short(self, sequence: Sequence) -> bool:
        """True if a sequence has few tokens to compute, or had when it started."""
        return sequence.short if sequence.slot else self.uncomputed(sequence) <= self._config.short_prefill

    def uncomputed(self, sequence: Sequence) -> int:
        """Number of tokens of a sequence to compute; an estimate before it has started."""
        if sequence.slot:
            return sequence.uncomputed
        return sequence.known - self._memory.matched(sequence, self._memory.reusable(sequence))

    def admit(self, step: StepBuilder, sequence: Sequence, *, idle: bool) -> Admission:
        """Gives a waiting sequence a seat and its memory, or tells why not now.

        Args:
            idle: True if no step is in flight.
        """
        if sequence in step.deferred:
            return Admission.DEFERRED
        if len(self._queue.running) + step.seats_kept >= self._config.max_num_seqs or sequence.pending:
            # Pending: it was preempted while a step samples its next token, which it will compute again with the rest.
            return self._block(sequence)
        if self._waits(sequence, step.now):
            return self._defer(step, sequence)
        shared = self._prefixes.branches(sequence)
        spare = self._headroom + step.blocks_kept
        allocation, restore = self._memory.start(sequence, spare, shared, last_resort=idle and not step.has_chunks)
        if allocation is Allocation.LOADING:
            sequence.load_began = step.now
            sequence.load_until = step.now + min(self._config.load_patience, sequence.load_patience)
            return self._defer(step, sequence)
        if allocation is Allocation.NO_MEMORY:
            return self._block(sequence)
        sequence.held_up = False
        sequence.short = sequence.uncomputed <= self._config.short_prefill
        self._prefixes.promise(sequence, sequence.snapshot_positions)
        if restore is not None:
            step.restores.append(restore)
        if sequence.cached_tokens is None:
            sequence.first_scheduled(step.now, self._memory.cost.seconds(0, sequence.computed))
        self._queue.start(sequence)
        return Admission.ADMITTED

    @property
    def _headroom(self) -> int:
        """Blocks that stay free when a sequence starts, so that it does not cause a preemption at once."""
        return min(len(self._queue.running), self._config.num_blocks // 64)

    def _waits(self, sequence: Sequence, now: float) -> bool:
        """True if a sequence will resume from a state that is not there yet: one that a tier loads, or that a sequence
        of better rank will save inside a common prefix."""
        if sequence.load_id:
            loading = self._memory.is_loading(sequence.load_id)
            if loading and now < sequence.load_until:
                return True
            load_id, sequence.load_id = sequence.load_id, 0
            if loading and not any(other.load_id == load_id for other in self._queue.waiting):
                self._memory.give_up(load_id)
        limit = self._memory.reusable(sequence)
        promised = self._prefixes.promised(sequence, limit)
        gain = self._config.block_size
        return promised >= gain and promised - self._memory.matched(sequence, limit) >= gain

    def _defer(self, step: StepBuilder, sequence: Sequence) -> Admission:
        """Reserves a seat and memory for a sequence that waits, so that those behind it do not take them."""
        step.deferred.add(sequence)
        step.seats_kept += 1
        step.blocks_kept += self._memory.blocks_for(sequence.known)
        return Admission.DEFERRED

    def _block(self, sequence: Sequence) -> Admission:
        sequence.held_up = True
        return Admission.BLOCKED
