"""StepBuilder: one step while it is planned and, until its results are in, in flight. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from services.engine.constraints.masks import WantedMasks
from services.engine.kv_cache.radix_tree import InFlightNodes
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.prompt_scoring import PromptRead, PromptReport
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import Restore, Snapshot
from services.engine.scheduler.step_plan import DRAFT, Chunk, StateCopy, StepPlan, StepResult


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
        self.drafts = False
        self.num_draft_tokens = 0
        """As of the plan."""
        self.sequences: list[Sequence] = []
        """Sequences of the chunks, in their order: decodes first, once the plan is finished."""
        self.sampling: list[Sequence] = []
        """Sequences whose chunk samples, in the same order."""
        self.reading: list[Sequence] = []
        """Sequences whose prompt rows are read, in the order of the plan's reads."""
        self.plan: StepPlan | None = None
        self._reads: list[tuple[Chunk, tuple[int, int]]] = []
        self._chunks: list[Chunk] = []
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

    def add_drafts(self, place: int, count: int) -> None:
        """Puts draft tokens behind the decode at a place."""
        chunk, sequence = self._chunks[place], self.sequences[place]
        token_ids = (*chunk.token_ids, *(DRAFT,) * count)
        sequence.uncertain += count
        masked = sequence.may_mask(chunk.output_count)
        self._chunks[place] = chunk._replace(token_ids=token_ids, num_draft_tokens=count, masked=masked)
        self.masked = self.masked or masked

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks or self._prefills)

    @property
    def decodes_only(self) -> bool:
        return not self._prefills

    @property
    def planned(self) -> list[Sequence]:
        """Sequences of a step that is not finished, decodes first."""
        return [*self.sequences, *(sequence for sequence, _ in self._prefills)]

    def planned_sampling(self) -> list[Sequence]:
        """Those of ``planned`` whose chunk samples."""
        return [*self.sequences, *(sequence for sequence, chunk in self._prefills if chunk.samples)]

    @property
    def uncertain(self) -> int:
        """Draft tokens whose sequence still runs."""
        pairs = zip(self.sequences, self._chunks, strict=True)
        return sum(chunk.num_draft_tokens for sequence, chunk in pairs if sequence.slot and not sequence.ended)

    def wanted_masks(self, drafts: SequenceABC[SequenceABC[int]]) -> tuple[list[Sequence], list[WantedMasks]]:
        """Masked sequences, and what masks they need.

        Args:
            drafts: draft tokens of each chunk that samples.
        """
        sequences: list[Sequence] = []
        wanted: list[WantedMasks] = []
        at = 0
        chunks = (chunk for chunk in self._chunks if chunk.samples)
        for sequence, chunk, drafted in zip(self.sampling, chunks, drafts, strict=True):
            if chunk.masked:
                sequences.append(sequence)
                wanted.append(WantedMasks(at, None if sequence.ended else sequence.matcher, drafted))
            at += chunk.sampled_rows
        return sequences, wanted

    def finish(self) -> StepPlan:
        """Finished step plan, decodes first."""
        self.sampling = self.planned_sampling()
        self.sequences = self.planned
        self._chunks += [chunk for _, chunk in self._prefills]
        self.plan = StepPlan(
            chunks=self._chunks,
            copies_before=[restore.state for restore in self.restores],
            copies_after=self.copies,
            block_copies=[restore.block for restore in self.restores if restore.block is not None],
            reads=self._placed_reads() if self._reads else (),
            masked=self.masked,
            drafts=self.drafts,
            num_draft_tokens=self.num_draft_tokens,
        )
        return self.plan

    def check(self, result: StepResult, *, speculative: bool) -> None:
        """Raises ValueError if a result is not one of this step."""
        plan = self.plan
        if plan is None:
            raise ValueError("a result came before the plan was finished")
        rows = sum(chunk.sampled_rows for chunk in plan.chunks) if speculative else len(self.sampling)
        if len(result.tokens) != rows:
            raise ValueError(f"the step returned {len(result.tokens)} tokens for {rows} sampling rows")
        if speculative:
            self._check_accepted(plan, result.accepted)
        if len(result.reports) != len(plan.reads):
            raise ValueError(f"the step returned {len(result.reports)} reports for {len(plan.reads)} reads")

    def _check_accepted(self, plan: StepPlan, accepted: SequenceABC[int]) -> None:
        chunks = [chunk for chunk in plan.chunks if chunk.samples]
        if len(accepted) != len(chunks):
            raise ValueError(f"the step says of {len(accepted)} chunks how many tokens count, {len(chunks)} sample")
        for sequence, chunk, count in zip(self.sampling, chunks, accepted, strict=True):
            name, most = sequence.request.request_id, chunk.sampled_rows
            if not (sequence.ended and count == 0) and not 1 <= count <= most:
                raise ValueError(f"accepted must be between 1 and {most} for {name}, which goes on, got {count}")

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
