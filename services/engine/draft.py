"""The plan of one step while it is made and, until its results are in, in flight. No torch here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from services.engine.memory.prefix import Namespace
from services.engine.memory.sequences import Restore, Snapshot
from services.engine.plan import Chunk, StateCopy, StepPlan
from services.engine.sequence import Sequence


class Draft:
    """A StepPlan and the sequences and memory behind it."""

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.decodes: list[tuple[Sequence, Chunk]] = []
        self.prefills: list[tuple[Sequence, Chunk]] = []
        self.restores: list[Restore] = []
        self.snapshots: list[Snapshot] = []
        self._snapshot_keys: set[tuple[Namespace, SequenceABC[int]]] = set()
        self.seats_kept = 0
        """For sequences that wait one step for a snapshot of this plan."""
        self.blocks_kept = 0
        self.plan: StepPlan | None = None

    def add(self, sequence: Sequence, end: int) -> None:
        """Plans a sequence's tokens up to position ``end``."""
        chunk = sequence.chunk(end)
        (self.decodes if chunk.is_decode else self.prefills).append((sequence, chunk))
        self.budget -= len(chunk.token_ids)

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._snapshot_keys.add(_key(snapshot.sequence, snapshot.position))

    def has_snapshot(self, sequence: Sequence, position: int) -> bool:
        """Whether this plan computes and keeps the same first ``position`` tokens under the same policy."""
        return bool(self._snapshot_keys) and _key(sequence, position) in self._snapshot_keys

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
            copies_before=[restore.copy for restore in self.restores],
            copies_after=[StateCopy(snapshot.sequence.slot, snapshot.slot) for snapshot in self.snapshots],
        )
        return self.plan


def _key(sequence: Sequence, position: int) -> tuple[Namespace, SequenceABC[int]]:
    return sequence.namespace, sequence.request.prompt_token_ids[:position]
