"""StepBuilder: one step while it is planned and, until its results are in, in flight. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from services.engine.kv_cache.radix_tree import InFlightNodes
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.prompt_scoring import PromptRead, PromptReport
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import Restore, Snapshot
from services.engine.scheduler.step_plan import Chunk, StateCopy, StepPlan, StepResult


class StepBuilder:
    """Builds a StepPlan and keeps the sequences and memory behind it."""

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.restores: list[Restore] = []
        self.snapshots: list[Snapshot] = []
        self.copies: list[StateCopy] = []
        """State copies of the snapshots at the end of a chunk."""
        self.pending = InFlightNodes()
        """Nodes of the prefix cache that can be used once the step has run."""
        self.deferred: set[Sequence] = set()
        """Sequences that wait for a state that is being computed or loaded."""
        self.computed: list[Sequence] = []
        """Sequences whose prompt the step computes to its end."""
        self.landed: list[Callable[[], None]] = []
        """Calls to make when the step is no longer in flight."""
        self.seats_kept = 0
        """Seats reserved for the deferred sequences."""
        self.blocks_kept = 0
        self.decodes_output = False
        """True if a sequence of the step has output and decodes its next token."""
        self.masked = False
        """True if a token is sampled under a mask."""
        self.sequences: list[Sequence] = []
        """Sequences of the chunks, in their order: decodes first, once the plan is finished."""
        self.sampling: list[Sequence] = []
        """Sequences whose chunk samples, in the same order."""
        self.reading: list[Sequence] = []
        """Sequences whose prompt rows are read, in the order of the plan's reads."""
        self.plan: StepPlan | None = None
        self._reads: list[tuple[Chunk, tuple[int, int]]] = []
        self._chunks: list[Chunk] = []
        self._verifying: list[tuple[Sequence, Chunk]] = []
        self._prefills: list[tuple[Sequence, Chunk]] = []

    def add(self, sequence: Sequence, end: int, snapshots: SequenceABC[Snapshot] = ()) -> None:
        """Plans a sequence's tokens up to position ``end``, with the snapshots inside it and at its end."""
        self.snapshots += snapshots
        self.copies += [StateCopy(sequence.slot, taken.slot) for taken in snapshots if taken.position == end]
        chunk = sequence.advance(end, [(taken.position, taken.slot) for taken in snapshots if taken.position < end])
        self.budget -= end - chunk.start
        if sequence.reading is not None and (rows := sequence.reading.take(chunk.start, end)) is not None:
            self._reads.append((chunk, rows))
            self.reading.append(sequence)
        self.masked = self.masked or chunk.masked
        if not chunk.is_decode:
            self._prefills.append((sequence, chunk))
            return
        self.sequences.append(sequence)
        self._chunks.append(chunk)
        if chunk.output_count:
            self.decodes_output = True

    def add_verified(self, sequence: Sequence) -> None:
        """Plans all uncomputed tokens of an answer: several, or one and a draft token behind it."""
        chunk = sequence.verify()
        self.budget -= len(chunk.token_ids)
        self._verifying.append((sequence, chunk))
        self.decodes_output = True

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks or self._verifying or self._prefills)

    def masked_rows(self) -> list[tuple[int, Sequence]]:
        """(sampled row, sequence) of each sequence whose token is sampled under a mask and still wanted."""
        rows: list[tuple[int, Sequence]] = []
        at = 0
        chunks = (chunk for chunk in self._chunks if chunk.samples)
        for sequence, chunk in zip(self.sampling, chunks, strict=True):
            if chunk.masked and not sequence.ended:
                rows.append((at, sequence))
            at += chunk.sampled_rows
        return rows

    def finish(self) -> StepPlan:
        """Finished step plan, decodes first."""
        # A sequence that resumes after a preemption may have only a few tokens of its answer to compute.
        others = sorted(self._verifying + self._prefills, key=lambda pair: not pair[1].verifies)
        self.sampling = [*self.sequences, *(sequence for sequence, chunk in others if chunk.samples)]
        self.sequences += [sequence for sequence, _ in others]
        self._chunks += [chunk for _, chunk in others]
        self.plan = StepPlan(
            chunks=self._chunks,
            copies_before=[restore.state for restore in self.restores],
            copies_after=self.copies,
            block_copies=[restore.block for restore in self.restores if restore.block is not None],
            reads=self._placed_reads() if self._reads else (),
            masked=self.masked,
        )
        return self.plan

    def check(self, result: StepResult, *, speculative: bool) -> None:
        """Raises ValueError if a result is not one of this step."""
        plan = self.plan
        if plan is None:
            raise ValueError("a result came before the plan was finished")
        rows = sum(chunk.sampled_rows for chunk in plan.chunks) if speculative else len(self.sampling)
        if len(result.tokens) != rows or (speculative and len(result.draft_token_ids) != len(self.sampling)):
            raise ValueError(f"the step returned {len(result.tokens)} tokens for {rows} sampling rows")
        if len(result.reports) != len(plan.reads):
            raise ValueError(f"the step returned {len(result.reports)} reports for {len(plan.reads)} reads")

    def prompt_updates(
        self, reports: SequenceABC[PromptReport], end: Callable[[Sequence], SequenceUpdate]
    ) -> list[SequenceUpdate]:
        """Updates with what the step has read of prompts; ``end`` ends a request whose numbers are not finite."""
        if self.plan is None or not reports:
            return []
        return [
            sequence.report(report, read) if report.finite else end(sequence)
            for sequence, read, report in zip(self.reading, self.plan.reads, reports, strict=True)
            if not sequence.ended
        ]

    def _placed_reads(self) -> list[PromptRead]:
        places = {id(chunk): place for place, chunk in enumerate(self._chunks)}
        return [PromptRead(places[id(chunk)], *rows) for chunk, rows in self._reads]
