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
from services.engine.draft import Draft
from services.engine.limits import Counts, SchedulerConfig
from services.engine.memory.integrity import IntegrityError
from services.engine.memory.sequences import SequenceMemory
from services.engine.plan import SampledToken, StepPlan, StepResult
from services.engine.request import FinishReason, Request
from services.engine.sequence import Rank, Sequence
from services.engine.updates import SequenceUpdate

_FEW_DEADLINES = 64


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    """It waits one step; others may start."""
    BLOCKED = enum.auto()
    """Nobody behind it may start either."""


class Scheduler:
    """Owns every sequence, block and slot. One thread calls it: ``schedule``, run the plan, ``update`` or ``fail``.

    ``add`` and ``abort`` may come at any time between those calls.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._memory = SequenceMemory(config)
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

    def counts(self) -> Counts:
        blocks = self._memory.blocks
        return Counts(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_used=blocks.used,
            blocks_cached=blocks.idle,
            blocks_total=blocks.total,
            slots_used=len(self._running),
            slots_cached=self._memory.num_snapshots,
            slots_total=self._memory.num_slots,
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
        for restore in draft.restores:
            self._memory.restored(restore)
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
            self._memory.end_snapshot(snapshot, taken=True)
        return updates

    def fail(self, plan: StepPlan, error: TemperError) -> list[SequenceUpdate]:
        """Ends every request of a step that failed, and gives up the snapshots it would have taken."""
        draft = self._take(plan)
        for restore in draft.restores:
            self._memory.restored(restore)
        for snapshot in draft.snapshots:
            self._memory.end_snapshot(snapshot, taken=False)
        return [self._end(sequence, FinishReason.ERROR, error) for sequence, _ in draft.entries if not sequence.ended]

    def abandon(self, error: TemperError) -> list[SequenceUpdate]:
        """The last updates of all requests, for the way out of an IntegrityError: a new scheduler takes over."""
        updates = self.take_expired()
        updates += [sequence.last_update(FinishReason.ERROR, error) for sequence in self._sequences.values()]
        self._sequences = {}
        return updates

    def clear_cache(self) -> None:
        """Forgets all cached prompts."""
        self._memory.clear_cache()

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
        self._memory.check(self._running, self._in_flight.snapshots if self._in_flight is not None else ())

    # Planning.

    def _expire(self, now: float) -> None:
        if len(self._deadlines) > _FEW_DEADLINES + 2 * len(self._sequences):
            # Most have ended before their deadline; behind one that has not, they would stay here with their prompts.
            self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
            heapq.heapify(self._deadlines)
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
            if self._memory.could_hold(head.known) and len(self._running) < self.config.max_num_seqs:
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
        while not self._memory.grow(sequence):
            # Those behind are not in the plan yet: decodes are planned in rank order.
            worst = self._running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
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
        """Gives a waiting sequence a seat and its memory, or says why not now."""
        if len(self._running) + draft.seats_kept >= self.config.max_num_seqs:
            return _Admission.BLOCKED
        if draft.has_snapshot(sequence, self._memory.boundary(sequence)):
            # An equal prompt is being computed by this very plan (n completions of one prompt): hit it one step later.
            draft.seats_kept += 1
            draft.blocks_kept += self._memory.blocks_for(sequence.known)
            return _Admission.DEFERRED
        # So that it does not cause a preemption at once.
        headroom = min(len(self._running), self.config.num_blocks // 64)
        started, restore = self._memory.start(sequence, headroom + draft.blocks_kept, last_resort=not draft.has_chunks)
        if not started:
            return _Admission.BLOCKED
        if restore is not None:
            draft.restores.append(restore)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.scheduled_at = draft.now
        return _Admission.ADMITTED

    def _add_chunk(self, draft: Draft, sequence: Sequence, end: int) -> None:
        """Plans the tokens up to ``end``, or up to the next position where a snapshot can be taken."""
        for split in sequence.splits:
            if sequence.computed < split <= end and not draft.has_snapshot(sequence, split):
                snapshot = self._memory.begin_snapshot(sequence, split)
                if snapshot is not None:
                    draft.add_snapshot(snapshot)
                    end = split
                    break
        draft.add(sequence, end)

    def _preempt(self, sequence: Sequence) -> None:
        _remove(self._running, sequence)
        self._memory.free(sequence)
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
        self._memory.free(sequence)
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
