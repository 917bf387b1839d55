"""A StepPlan in the making and, until its results are in, in flight. No torch here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from services.engine.memory.prefix import Namespace, Node
from services.engine.plan import Chunk, StateCopy, StepPlan
from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot that the plan copies a sequence's state to when it has computed the first ``position`` tokens."""

    sequence: Sequence
    position: int
    slot: int


class Draft:
    """A plan in the making and, until its update, in flight."""

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.decodes: list[tuple[Sequence, Chunk]] = []
        self.prefills: list[tuple[Sequence, Chunk]] = []
        self.copies_before: list[StateCopy] = []
        self.restored: list[Node] = []
        self.snapshots: list[Snapshot] = []
        self.snapshot_keys: set[tuple[Namespace, SequenceABC[int]]] = set()
        self.seats_kept = 0
        """For sequences that wait one step for a snapshot of this plan."""
        self.blocks_kept = 0
        self.plan: StepPlan | None = None

    def add(self, sequence: Sequence, end: int) -> None:
        """Plans a sequence's tokens up to position ``end``."""
        chunk = sequence.chunk(end)
        (self.decodes if chunk.is_decode else self.prefills).append((sequence, chunk))
        self.budget -= len(chunk.token_ids)

    @property
    def has_chunks(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def entries(self) -> list[tuple[Sequence, Chunk]]:
        return self.decodes + self.prefills

    def finish(self) -> StepPlan:
        """The plan, decodes first."""
        self.plan = StepPlan(
            chunks=[chunk for _, chunk in self.entries],
            copies_before=self.copies_before,
            copies_after=[StateCopy(snapshot.sequence.slot, snapshot.slot) for snapshot in self.snapshots],
        )
        return self.plan
