"""Steps in flight: planned, and their results are not in yet. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.engine.kv_cache.radix_tree import Pending
from services.engine.scheduler.pending_prefixes import Sharing
from services.engine.scheduler.sequence_memory import Restore, SequenceMemory
from services.engine.scheduler.step_builder import Draft
from services.engine.scheduler.step_plan import StepPlan


class Flights:
    """The drafts of the steps in flight, oldest first; they run and land in this order."""

    def __init__(self, memory: SequenceMemory, sharing: Sharing) -> None:
        self._memory = memory
        self._sharing = sharing
        self._drafts: deque[Draft] = deque()

    def __len__(self) -> int:
        return len(self._drafts)

    def add(self, draft: Draft) -> None:
        self._drafts.append(draft)

    def oldest(self, plan: StepPlan) -> Draft:
        """Raises ValueError: the plan is not the oldest in flight."""
        if not self._drafts or self._drafts[0].plan is not plan:
            raise ValueError("the plan is not in flight, or not the oldest that is")
        return self._drafts[0]

    @property
    def youngest(self) -> Pending | None:
        """What the youngest step leaves in the prefix cache; None: no step is in flight."""
        return self._drafts[-1].pending if self._drafts else None

    @property
    def num_sampling(self) -> int:
        """Tokens that will be sampled and are still wanted."""
        return sum(not sequence.ended for draft in self._drafts for sequence in draft.sampling)

    @property
    def restores(self) -> list[Restore]:
        return [restore for draft in self._drafts for restore in draft.restores]

    def land(self, *, succeeded: bool) -> Draft:
        """The oldest step is over: what it computed can be used, or is given up."""
        draft = self._drafts.popleft()
        if succeeded:
            self._memory.confirm(draft.pending)
        else:
            # What later steps compute stands on what this one has not.
            for failed in (draft, *self._drafts):
                self._memory.discard(failed.pending)
        for restore in draft.restores:
            self._memory.restored(restore)
        for snapshot in draft.snapshots:
            self._memory.end_snapshot(snapshot)
            self._sharing.kept(snapshot.sequence, snapshot.position)
        for sequence in draft.computed:
            if not sequence.waiting:
                self._sharing.remove(sequence)
        for call in draft.landed:
            call()
        return draft

    def when_landed(self, call: Callable[[], None]) -> None:
        """Calls once no step that is in flight now is any more: at once if there is none."""
        if self._drafts:
            self._drafts[-1].landed.append(call)
        else:
            call()

    def discard(self) -> None:
        """Every step is over, and nobody looks at its result."""
        while self._drafts:
            for call in self._drafts.popleft().landed:
                call()
