"""Continuous batching: which tokens of which sequences the next step computes, and where they are kept.

One step: every sequence that only lacks its newest token decodes; what is left of the token budget goes to prefill
chunks, best rank first (priority, then arrival). An admitted sequence gets the blocks of all its known tokens, so only
decodes can run out of blocks later; then the worst-ranked sequence is preempted, loses its blocks and slot, and later
computes its prompt and output again. Sampling depends on the history alone, so it continues as if nothing had
happened. Plain Python with no torch: requests in, a StepPlan out.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from itertools import pairwise

from services.common.errors import DeadlineExceeded, InvalidRequest, TemperError
from services.engine.draft import Draft, Snapshot
from services.engine.limits import Counts, SchedulerConfig
from services.engine.memory.blocks import BlockPool
from services.engine.memory.integrity import IntegrityError
from services.engine.memory.prefix import PrefixCache
from services.engine.memory.slots import SlotPool
from services.engine.plan import SampledToken, StateCopy, StepPlan, StepResult
from services.engine.request import FinishReason, Request
from services.engine.sequence import Rank, Sequence
from services.engine.updates import SequenceUpdate


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    BLOCKED = enum.auto()


class Scheduler:
    """Owns every sequence, block and slot. One thread calls it: ``schedule``, run the plan, ``update`` or ``fail``.

    ``add`` and ``abort`` may come at any time between those calls.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._blocks = BlockPool(config.num_blocks)
        self._slots = SlotPool(config.num_slots)
        self._cache = PrefixCache(self._blocks, self._slots, config.block_size)
        self._sequences: dict[str, Sequence] = {}
        # Both sorted by rank.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._expired: list[SequenceUpdate] = []
        self._in_flight: Draft | None = None
        self._added = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` has something to run or to report."""
        return bool(self._sequences or self._expired)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def counts(self) -> Counts:
        return Counts(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_used=self._blocks.used,
            blocks_cached=self._blocks.idle,
            blocks_total=self._blocks.total,
            slots_used=len(self._running),
            slots_cached=self._cache.num_snapshots,
            slots_total=self._slots.total,
            preemptions=self._preemptions,
        )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ContextLengthExceeded, InvalidRequest: it can never fit, or its id is in use.
        """
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use", param="request_id")
        max_output = self.config.max_output(len(request.prompt_token_ids), request.sampling.max_tokens)
        self._added += 1
        sequence = Sequence(request, max_output, self._added)
        self._sequences[request.request_id] = sequence
        insort(self._waiting, sequence, key=_rank)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._added, sequence))

    def abort(self, request_id: str, keep_tokens: int = 0) -> SequenceUpdate | None:
        """Ends a request and frees what it holds.

        Args:
            keep_tokens: 0: nobody wants it any more. Otherwise its text ended (at a stop string) with this many output
                tokens: it counts as stopped there.

        Returns:
            Its last update, None if it is not here (any more).
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if keep_tokens <= 0:
            return self._end(sequence, FinishReason.ABORT)
        sequence.cut(keep_tokens)
        return self._end(sequence, FinishReason.STOP)

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step.

        Args:
            now: the clock of the requests' deadlines, seconds.

        Returns:
            None if nothing can run: every request is gone or ended (see ``take_expired``).

        Raises:
            IntegrityError: the plan before was neither updated nor failed, or there is work that nothing can start.
        """
        if self._in_flight is not None:
            raise IntegrityError("schedule() is called while a plan is in flight")
        self._expire(now)
        if not self._sequences:
            return None
        draft = Draft(self.config.token_budget, now)
        self._make_way()
        self._add_decodes(draft)
        self._add_prefills(draft)
        if not draft.has_chunks:
            raise IntegrityError(f"{len(self._running)} running and {len(self._waiting)} waiting, but no step to run")
        self._in_flight = draft
        return draft.finish()

    def take_expired(self) -> list[SequenceUpdate]:
        """The last updates of requests whose deadline ``schedule`` found passed."""
        expired, self._expired = self._expired, []
        return expired

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Takes in what the step computed.

        Args:
            now: when the result was there, in the clock of ``schedule``.

        Raises:
            ValueError: the plan is not in flight or the result does not have one token for each sampling chunk; the
                plan is still in flight then, and ``fail`` ends it.
        """
        draft = self._take(plan)
        samples = sum(chunk.samples for chunk in plan.chunks)
        if len(result.tokens) != samples:
            self._in_flight = draft
            raise ValueError(f"the step returned {len(result.tokens)} tokens for {samples} sampling chunks")
        for node in draft.restored:
            self._cache.unpin(node)
        tokens = iter(result.tokens)
        updates: list[SequenceUpdate] = []
        for sequence, chunk in draft.entries:
            token = next(tokens) if chunk.samples else None
            if sequence.ended:
                continue
            sequence.computed += len(chunk.token_ids)
            if token is not None:
                updates.append(self._append(sequence, token, now))
        for snapshot in draft.snapshots:
            self._store(snapshot)
        return updates

    def fail(self, plan: StepPlan, error: TemperError) -> list[SequenceUpdate]:
        """Ends every request of a step that failed, and gives up the snapshots it would have taken."""
        draft = self._take(plan)
        for node in draft.restored:
            self._cache.unpin(node)
        for snapshot in draft.snapshots:
            self._slots.release(snapshot.slot)
        return [self._end(sequence, FinishReason.ERROR, error) for sequence, _ in draft.entries if not sequence.ended]

    def abandon(self, error: TemperError) -> list[SequenceUpdate]:
        """The last updates of all requests, for the way out of an IntegrityError: a new scheduler takes over."""
        updates = self.take_expired()
        updates += [sequence.last_update(FinishReason.ERROR, error) for sequence in self._sequences.values()]
        self._sequences = {}
        return updates

    def clear_cache(self) -> None:
        """Forgets all cached prompts."""
        self._cache.clear()

    def check_integrity(self) -> None:
        """Compares all books with each other; cheap enough for every idle moment.

        Raises:
            IntegrityError: something is leaked, shared or lost.
        """
        live = [*self._running, *self._waiting]
        if len(live) != len(self._sequences) or any(self._sequences.get(s.request.request_id) is not s for s in live):
            raise IntegrityError(f"{len(live)} sequences run or wait, {len(self._sequences)} are registered")
        for sequences, name in ((self._running, "running"), (self._waiting, "waiting")):
            if any(a.rank >= b.rank for a, b in pairwise(sequences)):
                raise IntegrityError(f"the {name} sequences are out of order")
        for sequence in live:
            if sequence.ended or sequence.computed >= sequence.known:
                raise IntegrityError(f"{sequence.request.request_id} has ended or has nothing to compute")
        for sequence in self._waiting:
            if sequence.blocks or sequence.slot or sequence.computed:
                raise IntegrityError(f"{sequence.request.request_id} waits but holds blocks or a slot")
        for sequence in self._running:
            if len(sequence.blocks) * self.config.block_size < sequence.computed or not sequence.slot:
                raise IntegrityError(f"{sequence.request.request_id} runs without its blocks or slot")
        in_flight = self._in_flight.snapshots if self._in_flight is not None else []
        self._blocks.check((block for s in self._running for block in s.blocks), self._cache.held_blocks())
        self._slots.check(
            [*(s.slot for s in self._running), *self._cache.held_slots(), *(snapshot.slot for snapshot in in_flight)]
        )

    # Planning.

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][2].ended or self._deadlines[0][0] <= now):
            deadline, _, sequence = heapq.heappop(self._deadlines)
            if not sequence.ended:
                error = DeadlineExceeded(
                    f"the deadline passed {now - deadline:.3f} s ago, after {len(sequence.output_ids)} output tokens"
                )
                self._expired.append(self._end(sequence, FinishReason.ERROR, error))

    def _make_way(self) -> None:
        """Preempts sequences of strictly lower priority when the best waiting one could not start otherwise."""
        while self._waiting and self._running:
            head, worst = self._waiting[0], self._running[-1]
            if head.request.priority >= worst.request.priority:
                return
            fits = self._blocks_for(head.known) <= self._blocks.free + self._blocks.idle
            if fits and len(self._running) < self.config.max_num_seqs:
                return
            self._preempt(worst)

    def _add_decodes(self, draft: Draft) -> None:
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            # One token lacks: a decode, or the tail of a prompt.
            if sequence.known - sequence.computed == 1 and self._grow(sequence):
                draft.add(sequence, sequence.known)

    def _grow(self, sequence: Sequence) -> bool:
        """Gets the block of the next token, from worse-ranked sequences if need be; False: preempted itself."""
        if sequence.known <= len(sequence.blocks) * self.config.block_size:
            return True
        while not self._reserve(1):
            # Those behind are not in the plan yet: decodes are planned in rank order.
            worst = self._running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
        sequence.blocks += self._blocks.take(1)
        return True

    def _add_prefills(self, draft: Draft) -> None:
        planned = {sequence.rank for sequence, _ in draft.decodes}
        partial = [sequence for sequence in self._running if sequence.rank not in planned]
        partial.reverse()
        turn = 0
        blocked = False
        while draft.budget > 0:
            candidate = self._waiting[turn] if not blocked and turn < len(self._waiting) else None
            if partial and (candidate is None or partial[-1].rank < candidate.rank):
                sequence = partial.pop()
            elif candidate is not None:
                admission = self._admit(draft, candidate)
                if admission is not _Admission.ADMITTED:
                    blocked = admission is _Admission.BLOCKED
                    turn += 1
                    continue
                del self._waiting[turn]
                insort(self._running, candidate, key=_rank)
                sequence = candidate
            else:
                return
            self._add_chunk(draft, sequence, min(sequence.known, sequence.computed + draft.budget))

    def _admit(self, draft: Draft, sequence: Sequence) -> _Admission:
        """Gives a waiting sequence a seat, a slot and the blocks of all its known tokens, shared ones first."""
        if len(self._running) + draft.seats_kept >= self.config.max_num_seqs:
            return _Admission.BLOCKED
        boundary = self._snapshot_boundary(sequence)
        prompt = sequence.request.prompt_token_ids
        if boundary and (sequence.namespace, prompt[:boundary]) in draft.snapshot_keys:
            # An equal prompt is being computed by this very plan (n completions of one prompt): hit it one step later.
            draft.seats_kept += 1
            draft.blocks_kept += self._blocks_for(sequence.known)
            return _Admission.DEFERRED
        match = self._cache.match(sequence.namespace, prompt, boundary)
        needed = self._blocks_for(sequence.known) - len(match.blocks)
        spare = self._headroom() + draft.blocks_kept
        if match.node is not None:
            # Held before anything is evicted to make room.
            source = self._cache.pin(match.node)
            self._blocks.share(match.blocks)
        slot = self._take_slot() if self._reserve(needed + spare) else None
        if slot is None:
            if match.node is not None:
                self._cache.unpin(match.node)
                self._blocks.release(match.blocks)
            if draft.has_chunks or self._slots.free or not self._cache.evict_slot():
                return _Admission.BLOCKED
            # The snapshot itself had the only slot that was left: it gave way.
            return self._admit(draft, sequence)
        sequence.slot = slot
        sequence.blocks = [*match.blocks, *self._blocks.take(needed)]
        sequence.computed = len(match.blocks) * self.config.block_size
        if match.node is not None:
            draft.copies_before.append(StateCopy(source, slot))
            draft.restored.append(match.node)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.scheduled_at = draft.now
        branch = match.shared_blocks * self.config.block_size
        sequence.splits = tuple(sorted({split for split in (branch, boundary) if split > sequence.computed}))
        return _Admission.ADMITTED

    def _add_chunk(self, draft: Draft, sequence: Sequence, end: int) -> None:
        """Plans the tokens up to ``end``, or up to the next position where a snapshot can be taken."""
        for split in sequence.splits:
            if sequence.computed < split <= end:
                slot = self._take_snapshot_slot(draft, sequence, split)
                if slot is not None:
                    draft.snapshots.append(Snapshot(sequence, split, slot))
                    draft.snapshot_keys.add((sequence.namespace, sequence.request.prompt_token_ids[:split]))
                    end = split
                    break
        draft.add(sequence, end)

    # Memory.

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _headroom(self) -> int:
        """Blocks an admission leaves to the running decodes, so that it does not cause a preemption at once."""
        return min(len(self._running), self.config.num_blocks // 64)

    def _reserve(self, count: int) -> bool:
        """Whether ``count`` blocks are free, after giving up cached ones if that is what it takes."""
        if count > self._blocks.free + self._blocks.idle:
            return False
        while self._blocks.free < count:
            if not self._cache.evict_blocks():
                return False
        return True

    def _take_slot(self) -> int | None:
        """A slot for a live sequence; snapshots give way."""
        slot = self._slots.take()
        if slot is None and self._cache.evict_slot():
            slot = self._slots.take()
        return slot

    def _snapshot_boundary(self, sequence: Sequence) -> int:
        """The last block boundary strictly before the prompt's end; 0 for prompts that are not worth a split."""
        length = len(sequence.request.prompt_token_ids)
        if not self.config.prefix_cache or length < 2 * self.config.block_size:
            return 0
        return (length - 1) // self.config.block_size * self.config.block_size

    def _take_snapshot_slot(self, draft: Draft, sequence: Sequence, position: int) -> int | None:
        """A slot for a snapshot, None if the cache has or gets it already or live sequences need all slots."""
        prompt = sequence.request.prompt_token_ids
        if (sequence.namespace, prompt[:position]) in draft.snapshot_keys:
            return None
        match = self._cache.match(sequence.namespace, prompt, position)
        if len(match.blocks) * self.config.block_size == position:
            return None
        return self._take_slot()

    def _store(self, snapshot: Snapshot) -> None:
        sequence = snapshot.sequence
        if sequence.ended:
            self._slots.release(snapshot.slot)
            return
        tokens = sequence.request.prompt_token_ids[: snapshot.position]
        blocks = sequence.blocks[: snapshot.position // self.config.block_size]
        self._cache.insert(sequence.namespace, tokens, blocks, snapshot.slot)

    def _free(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.blocks)
        if sequence.slot:
            self._slots.release(sequence.slot)
        # A plan in flight may still look at the old list.
        sequence.blocks = []
        sequence.slot = 0
        sequence.computed = 0

    def _preempt(self, sequence: Sequence) -> None:
        _remove(self._running, sequence)
        self._free(sequence)
        sequence.preemptions += 1
        self._preemptions += 1
        # Its rank puts it in front of everything that arrived later.
        insort(self._waiting, sequence, key=_rank)

    # Results.

    def _take(self, plan: StepPlan) -> Draft:
        draft = self._in_flight
        if draft is None or draft.plan is not plan:
            raise ValueError("the plan is not in flight")
        self._in_flight = None
        return draft

    def _append(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceUpdate:
        if token.error is not None:
            return self._end(sequence, FinishReason.ERROR, TemperError(token.error))
        reason = sequence.append(token, now, self.config.eos_token_ids)
        return sequence.update(token) if reason is None else self._end(sequence, reason, token=token)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: TemperError | None = None,
        token: SampledToken | None = None,
    ) -> SequenceUpdate:
        _remove(self._running if sequence.slot else self._waiting, sequence)
        self._free(sequence)
        sequence.ended = True
        del self._sequences[sequence.request.request_id]
        return sequence.last_update(reason, error, token)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of a list that is sorted by rank."""
    index = bisect_left(sequences, sequence.rank, key=_rank)
    if index >= len(sequences) or sequences[index] is not sequence:
        raise IntegrityError(f"{sequence.request.request_id} is not where it should be")
    del sequences[index]
