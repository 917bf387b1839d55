"""Scheduler: continuous batching. It decides which tokens of which sequences the next step computes, and where their KV
and states are kept. Plain Python with no torch: requests in, a StepPlan out.

One step: every sequence that only has its newest token to compute decodes. The rest of the token budget goes to prefill
chunks, best rank first (priority, then arrival). An admitted sequence gets the blocks of all its known tokens, so only
decodes can run out of blocks. Then the worst-ranked sequence is preempted: its blocks and slot go to the prefix cache,
and later it resumes from what is left of them. Sampling depends on the tokens alone, so its output does not change.

With a depth above 1 the next step is planned while others run. Tokens that they sample count as known (``pending``).
What a sequence does not need because it stopped or was aborted is dropped when the results are in. Steps run in the
order of their plans, so a later plan may reuse blocks and slots that an earlier one still reads.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

from services.common.errors import DeadlineExceeded, TemperError
from services.engine.constraints.masks import MaskMaker, RowMasks
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.radix_tree import Node
from services.engine.kv_offload.connector import OffloadConnector
from services.engine.kv_offload.conversation_sessions import ConversationSessions
from services.engine.kv_offload.messages import TierCommand, TierEvent
from services.engine.observability.status import Counts
from services.engine.requests.outputs import SampledToken, SequenceUpdate
from services.engine.requests.request import FinishReason, Request
from services.engine.scheduler.admission import Admission, Admissions
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.draft_tokens import Speculation
from services.engine.scheduler.pending_prefixes import PendingPrefixes
from services.engine.scheduler.request_queue import RequestQueue
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import SequenceMemory, Snapshot
from services.engine.scheduler.step_builder import StepBuilder
from services.engine.scheduler.step_plan import FIRST_SNAPSHOT, StepPlan, StepResult
from services.engine.scheduler.steps_in_flight import StepsInFlight

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager

_LONG_FOR_A_SHORT = 8
"""Duration of a step with a whole chunk relative to a small step (50 and 6 ms on an H200). A short prompt gains by a
small step what so many long ones lose."""
_FEW_LONG = 4
"""Most waiting long prompts for which a step with decodes leaves a quarter of its budget free."""


class Scheduler:
    """Scheduler: owns every sequence, block and slot. One thread calls it: ``schedule``, run the plan, ``update`` or
    ``fail``; a ``masked`` plan gets its ``masks`` in between. ``add`` and ``abort`` may come between any two calls.

    Args:
        depth: plans that may be in flight, i.e. scheduled and neither updated nor failed.
        tiers: offload below the device; None: there is none. ``take_commands`` has the commands for it.
        costs: of the runner's steps, for the number of draft tokens; None: they are not known.
    """

    def __init__(
        self, config: SchedulerConfig, depth: int = 1, tiers: TierManager | None = None, costs: StepCosts | None = None
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.config = config
        self._depth = depth
        self._now = 0.0
        self._memory = SequenceMemory(config, lambda: self._now, tiers)
        self.journal = self._memory.journal
        self._queue = RequestQueue(config)
        self._prefixes = PendingPrefixes()
        self._admissions = Admissions(config, self._memory, self._queue, self._prefixes)
        self.sessions = ConversationSessions(
            self._memory.cache,
            self._memory.offload,
            seconds=config.session_seconds,
            most=config.most_sessions,
            clock=lambda: self._now,
        )
        self._expired: list[SequenceUpdate] = []
        self._in_flight = StepsInFlight(self._memory, self._prefixes)
        self._speculation = Speculation(config, self._memory, costs)
        self._masks = MaskMaker()
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """True if there is a request, or an update to report."""
        return bool(self._queue or self._expired)

    def counts(self) -> Counts:
        blocks = self._memory.blocks
        return Counts(
            running=len(self._queue.running),
            waiting=len(self._queue.waiting),
            blocks_used=blocks.used,
            blocks_cached=blocks.idle,
            blocks_total=blocks.total,
            slots_used=len(self._queue.running),
            slots_cached=self._memory.num_snapshots,
            slots_total=self._memory.num_slots,
            preemptions=self._preemptions,
            num_drafts=self._speculation.num_drafts,
            num_draft_tokens=self._speculation.num_draft_tokens,
            num_accepted_tokens=self._speculation.num_accepted_tokens,
            evicted_bytes=self._memory.cache.evicted_bytes,
        )

    def find(self, request_id: str) -> Sequence | None:
        return self._queue.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request; raises as RequestQueue.add does."""
        sequence = self._queue.add(request)
        self._speculation.begin(sequence, len(self._queue) - 1)
        self._prefixes.add(sequence)

    def abort(self, request_id: str, keep_tokens: int = 0) -> SequenceUpdate | None:
        """Ends a request and frees what it holds.

        Args:
            keep_tokens: 0: the client is gone. Otherwise the text ended (at a stop string) with this many output
                tokens: it counts as stopped there.

        Returns:
            Its last update; None: the scheduler does not have it.
        """
        sequence = self._queue.get(request_id)
        if sequence is None:
            return None
        reason = FinishReason.ABORT if keep_tokens <= 0 else FinishReason.STOP
        return self._end(sequence, reason, keep_tokens=keep_tokens)

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step.

        Args:
            now: the clock of the requests' deadlines, seconds.

        Returns:
            None if nothing can run: every request is gone or ended (see ``take_expired``), or waits for the results of
            what is in flight, or for a tier.

        Raises:
            IntegrityError: as many plans as allowed are in flight, or there is work that nothing can start.
        """
        if len(self._in_flight) >= self._depth:
            raise IntegrityError(f"schedule() is called while {len(self._in_flight)} plans are in flight")
        self._now = now
        for deadline, sequence in self._queue.pop_expired(now):
            self._expire(sequence, now - deadline)
        if not self._queue:
            return None
        step = StepBuilder(self.config.token_budget, now)
        self._preempt_for_priority()
        partial = self._add_decodes(step)
        if step.decodes_output and self.config.mixed_prefill_tokens is not None:
            step.budget = min(step.budget, self.config.mixed_prefill_tokens)
        if partial or self._queue.waiting:
            self._add_prefills(step, partial)
        if not step.has_chunks:
            if self._in_flight or self._memory.copying:
                return None
            queue = self._queue
            raise IntegrityError(f"{len(queue.running)} running and {len(queue.waiting)} waiting, but no step to run")
        self._speculation.plan(step, self._queue.running)
        self._in_flight.add(step)
        return step.finish()

    def take_expired(self) -> list[SequenceUpdate]:
        """The last updates of requests whose deadline ``schedule`` found passed."""
        expired, self._expired = self._expired, []
        return expired

    def masks(self, plan: StepPlan, drafts: SequenceABC[SequenceABC[int]]) -> tuple[RowMasks, list[SequenceUpdate]]:
        """Masks of the oldest step in flight, made when all tokens before it are known, and the draft tokens of each
        chunk that samples.

        Returns:
            The masks, valid until the next call; rows of requests that have ended have none. And the last
            updates of requests whose constraint failed.

        Raises:
            ValueError: the plan is not the oldest in flight.
        """
        sequences, wanted = self._in_flight.oldest(plan).wanted_masks(drafts)
        masks, failures = self._masks.make(wanted)
        return masks, [self._end(sequences[at], FinishReason.ERROR, error) for at, error in failures]

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Takes the result of the oldest step in flight; tokens of requests that have ended are dropped.

        Args:
            now: time of the result, on the clock of ``schedule``.

        Raises:
            ValueError: the plan is not the oldest in flight or the result is not one of it; the plan is still in
                flight then, and ``fail`` ends it.
        """
        step = self._in_flight.oldest(plan)
        step.check(result, speculative=self.config.draft_tokens > 0)
        self._now = now
        self._in_flight.land(succeeded=True)
        updates = step.prompt_updates(result.reports, self._end_broken) if plan.reads else []
        for sequence, token in self._speculation.taken(step, plan, result):
            if not sequence.ended:
                self._append(sequence, token, now, updates)
        return updates

    def fail(self, plan: StepPlan, error: TemperError) -> list[SequenceUpdate]:
        """Ends every request of the oldest step in flight, which failed, and drops its snapshots."""
        self._in_flight.oldest(plan)
        step = self._in_flight.land(succeeded=False)
        ending = [sequence for sequence in step.sequences if not sequence.ended]
        return [self._end(sequence, FinishReason.ERROR, error, keep=False) for sequence in ending]

    def when_landed(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when every step that is in flight now has landed; at once if there is none. A step may still
        compute for a request that has ended since."""
        self._in_flight.when_landed(call)

    def discard(self) -> None:
        """Drops every step in flight and its result; for the shutdown."""
        self._in_flight.discard()

    def abandon(self, error: TemperError) -> list[SequenceUpdate]:
        """Last updates of all requests after an IntegrityError, before a new scheduler takes over."""
        updates = self.take_expired()
        updates += [sequence.last_update(FinishReason.ERROR, error) for sequence in self._queue]
        self._queue = RequestQueue(self.config)
        return updates

    def clear_cache(self) -> None:
        """Evicts the whole prefix cache of the device."""
        self._memory.clear_cache()

    @property
    def offload(self) -> OffloadConnector | None:
        """Offload connector, for conversation sessions; None: there are no tiers."""
        return self._memory.offload

    def device_bytes(self, node: Node) -> int:
        """Bytes on the device of the prefix that ends at a node."""
        return self._memory.cache.prefix_bytes(node)

    def take_commands(self) -> list[TierCommand]:
        """Commands for the tiers, to be submitted once every plan made so far has been launched."""
        return self._memory.take_commands()

    def take_events(self, events: SequenceABC[TierEvent]) -> None:
        """Takes events of the tiers."""
        for node in self._memory.take_events(events):
            self.sessions.saved(node)

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Learns the cost of prefill from the duration of a step on the device."""
        if not plan.num_decodes:
            runs = [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in plan.chunks]
            self._memory.cost.observe(runs, seconds)

    def check_integrity(self) -> None:
        """Checks that blocks, slots and sequences agree; cheap enough for every idle moment.

        Raises:
            IntegrityError: something is leaked, shared or lost.
        """
        self._queue.check()
        self._in_flight.check(self._queue)
        self._memory.check(self._queue.running, self._in_flight.restores)

    # Planning.

    def _expire(self, sequence: Sequence, late: float) -> None:
        tokens = len(sequence.output_ids)
        error = DeadlineExceeded(f"the deadline passed {late:.3f} s ago, after {tokens} output tokens")
        self._expired.append(self._end(sequence, FinishReason.ERROR, error))

    def _preempt_for_priority(self) -> None:
        """Preempts sequences of strictly lower priority if the best waiting one cannot start otherwise."""
        waiting, running = self._queue.waiting, self._queue.running
        while waiting and running:
            head, worst = waiting[0], running[-1]
            if head.request.priority >= worst.request.priority or head.pending or self._admissions.has_room(head):
                return
            self._preempt(worst)

    def _add_decodes(self, step: StepBuilder) -> list[Sequence]:
        """Plans the sequences with one token to compute (a decode, or the end of a prompt); returns those with more."""
        partial: list[Sequence] = []
        block_size = self.config.block_size
        # Preemption takes the end of the list, never what was planned: decodes are planned in rank order.
        for sequence in self._queue.running:
            known = sequence.known
            if known - sequence.computed != 1:
                partial.append(sequence)
            elif known < sequence.known_at_end:
                # Most tokens that its blocks must cover, see SequenceMemory.grow().
                tokens = known + sequence.uncertain
                if tokens <= len(sequence.blocks) * block_size or self._grow(sequence):
                    step.add(sequence, known)
        return [sequence for sequence in partial if sequence.slot]

    def _grow(self, sequence: Sequence) -> bool:
        """Allocates the block of the next token, preempting worse-ranked sequences if need be; False: it was preempted
        itself."""
        while not self._memory.grow(sequence):
            worst = self._queue.running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
        return True

    def _add_prefills(self, step: StepBuilder, partial: list[Sequence]) -> None:
        """Spends the rest of the budget on prefill chunks.

        Args:
            partial: running sequences with more than one token to compute, best rank first.
        """
        spared = self._add_short(step, partial)
        self._add_by_rank(step, partial, spared)

    def _add_by_rank(self, step: StepBuilder, partial: list[Sequence], spared: int) -> None:
        waiting = self._queue.waiting
        partial.reverse()
        turn = 0
        blocked = False
        while step.budget >= self.config.least_prefill:
            candidate = waiting[turn] if not blocked and turn < len(waiting) else None
            if partial and (candidate is None or partial[-1].rank < candidate.rank):
                self._add_chunk(step, partial.pop())
            elif candidate is not None:
                admission = self._admissions.admit(step, candidate, idle=not self._in_flight)
                if admission is Admission.ADMITTED:
                    self._add_chunk(step, candidate)
                else:
                    blocked = admission is Admission.BLOCKED
                    turn += 1
                    continue
            else:
                return
            step.budget, spared = step.budget - spared, 0

    def _add_short(self, step: StepBuilder, partial: list[Sequence]) -> int:
        """Plans short prompts, such as the next turn of a conversation, ahead of long ones.

        Short prompts wait for the end of the whole step, so a long one gets only a small chunk beside them. Where many
        long ones wait, that would do more harm than good. See docs/decisions/short-prompts-first.md.

        Returns:
            Tokens to leave free beside the first of few long ones, because a request that arrives while the step runs
            waits for its end, too.
        """
        least, budget = self.config.least_prefill, step.budget
        short, long = self._admissions.overtaking(partial)
        if not short:
            return budget // 4 if 0 < long <= _FEW_LONG and step.has_chunks else 0
        small = long <= _LONG_FOR_A_SHORT * len(short)
        kept = max(least, min(self.config.long_beside_short, budget // 2) if small else budget // 2)
        added = False
        for sequence in short:
            if step.budget - kept < max(self.config.short_prefill, least):
                break
            if sequence.slot:
                partial.remove(sequence)
            else:
                admission = self._admissions.admit(step, sequence, idle=not self._in_flight)
                if admission is Admission.BLOCKED:
                    break
                if admission is Admission.DEFERRED:
                    continue
                if not sequence.short:  # what it would have gone on from had to give way to it
                    insort(partial, sequence, key=lambda one: one.rank)
                    continue
            self._add_chunk(step, sequence)
            added = True
        if added and small:
            step.budget = min(step.budget, kept)
        return 0

    def _add_chunk(self, step: StepBuilder, sequence: Sequence) -> None:
        """Plans as much of a sequence as the budget allows, with the snapshots inside it."""
        start = sequence.computed
        end = self.config.chunk_end(start, sequence.known, step.budget)
        snapshots: list[Snapshot] = []
        for position in sequence.snapshot_positions:
            if position > end:
                break
            if position <= start:
                continue
            taken = self._memory.begin_snapshot(sequence, position, step.pending)
            if taken is None:
                self._prefixes.kept(sequence, position)
                continue
            snapshots.append(taken)
            if position < start + FIRST_SNAPSHOT:
                end = position
        if end == sequence.known:
            step.computed.append(sequence)
        step.add(sequence, end, snapshots)

    def _preempt(self, sequence: Sequence) -> None:
        self._queue.preempt(sequence)
        # It gave way to those of better rank; short ones of worse rank were preempted just as it was.
        sequence.held_up = True
        self._memory.free(sequence, self._in_flight.youngest, keep=True)
        self._prefixes.withdraw(sequence)
        self._prefixes.add(sequence)
        sequence.preemptions += 1
        self._preemptions += 1

    def _append(self, sequence: Sequence, token: SampledToken, now: float, updates: list[SequenceUpdate]) -> None:
        """Takes a sampled token and appends its update."""
        update, ending = sequence.take(token, now)
        if update is not None:
            updates.append(update)
        if ending is not None:
            updates.append(self._end(sequence, *ending, keep=ending.error is None))

    def _end_broken(self, sequence: Sequence) -> SequenceUpdate:
        error = TemperError("the model produced numbers that are not finite")
        return self._end(sequence, FinishReason.ERROR, error, keep=False)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: TemperError | None = None,
        token: SampledToken | None = None,
        *,
        keep_tokens: int = 0,
        keep: bool = True,
    ) -> SequenceUpdate:
        """Ends a request.

        Args:
            keep_tokens: output tokens to keep; 0: all.
            keep: whether what was computed is valid, so that the prefix cache may keep it.
        """
        self._queue.remove(sequence)
        node = self._memory.free(sequence, self._in_flight.youngest, keep=keep)
        self._prefixes.withdraw(sequence)
        self._prefixes.remove(sequence)
        if node is not None and sequence.request.session is not None:
            self.sessions.ended(sequence.request.session, node, sequence.request.pin.version)
        if keep_tokens > 0:
            sequence.cut(keep_tokens)
        return sequence.last_update(reason, error, token)
