"""Steps in flight: planned, and their results are not in yet. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.radix_tree import InFlightNodes
from services.engine.scheduler.pending_prefixes import PendingPrefixes
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.sequence_memory import Restore, SequenceMemory
from services.engine.scheduler.step_builder import StepBuilder
from services.engine.scheduler.step_plan import StepPlan


class StepsInFlight:
    """Queue of the steps in flight, oldest first; they run and land in this order."""

    def __init__(self, memory: SequenceMemory, prefixes: PendingPrefixes) -> None:
        self._memory = memory
        self._prefixes = prefixes
        self._steps: deque[StepBuilder] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepBuilder) -> None:
        self._steps.append(step)

    def oldest(self, plan: StepPlan) -> StepBuilder:
        """Builder of the oldest step; raises ValueError if the plan is not that step's."""
        if not self._steps or self._steps[0].plan is not plan:
            raise ValueError("the plan is not in flight, or not the oldest that is")
        return self._steps[0]

    @property
    def youngest(self) -> InFlightNodes | None:
        """Nodes of the youngest step; None: no step is in flight."""
        return self._steps[-1].pending if self._steps else None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares what the steps sample and check with what the sequences say.

        Raises:
            IntegrityError: a token is lost, or waited for by nobody.
        """
        pairs = [(sequence.pending, sequence.uncertain) for sequence in sequences]
        pending, uncertain = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        sampled = sum(not sequence.ended for step in self._steps for sequence in step.sampling)
        if pending != sampled:
            raise IntegrityError(f"{pending} tokens are pending, the steps in flight sample {sampled}")
        checked = sum(step.uncertain for step in self._steps)
        if uncertain != checked:
            raise IntegrityError(f"{uncertain} draft tokens are uncertain, the steps in flight check {checked}")

    @property
    def restores(self) -> list[Restore]:
        return [restore for step in self._steps for restore in step.restores]

    def land(self, *, succeeded: bool) -> StepBuilder:
        """Lands the oldest step: its nodes are confirmed if it succeeded, else discarded."""
        step = self._steps.popleft()
        if succeeded:
            self._memory.confirm(step.pending)
        else:
            # Later steps compute on top of what this one has not computed.
            for failed in (step, *self._steps):
                self._memory.discard(failed.pending)
        for restore in step.restores:
            self._memory.restored(restore)
        for snapshot in step.snapshots:
            self._memory.end_snapshot(snapshot)
            self._prefixes.kept(snapshot.sequence, snapshot.position)
        for sequence in step.computed:
            if not sequence.waiting:
                self._prefixes.remove(sequence)
        for call in step.landed:
            call()
        return step

    def when_landed(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when every step that is in flight now has landed; at once if there is none."""
        if self._steps:
            self._steps[-1].landed.append(call)
        else:
            call()

    def discard(self) -> None:
        """Drops every step and its result."""
        while self._steps:
            for call in self._steps.popleft().landed:
                call()
