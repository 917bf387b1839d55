"""Memory budget of training: how much of the plan's part the running job and the open sessions hold.

Adapters, gradients and optimizer states stay for as long as their owner lives and add up. Working memory (activations,
logits) does not: one thread computes, and frees what it used before another owner's turn. On a GPU steps are captured
as CUDA graphs; what these compute in is apart from all else, and shared by all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.common.errors import DoesNotFit, Unavailable
from services.trainer.memory.estimate import TrainingMemory, mib

if TYPE_CHECKING:
    from services.engine.models.training_arena import GraphMemory

_JOB = "the running job"
_TOGETHER = f"{_JOB}s' shared steps"


class MemoryTaken(Unavailable):
    """The job fits the plan, but not beside what open sessions hold now."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of one owner."""

    resident: int
    """Masters, gradients, optimizer."""
    working: int
    """At the peak of a microbatch."""
    captured: int = 0
    """Bytes that captured steps compute in."""

    @classmethod
    def of(cls, memory: TrainingMemory, *, captured: bool) -> MemoryNeed:
        """Need of an estimate.

        Args:
            captured: whether steps are captured as CUDA graphs.
        """
        inside = memory.captured if captured else 0
        return cls(memory.adapter, memory.total - memory.adapter - inside, inside)

    def __post_init__(self) -> None:
        if min(self.resident, self.working, self.captured) < 0:
            raise ValueError(f"bytes must not be negative: {self}")

    @property
    def peak(self) -> int:
        """Bytes needed to compute, in all."""
        return self.working + self.captured

    def uncaptured(self) -> MemoryNeed:
        """The same owner's, if its steps are launched kernel by kernel."""
        return MemoryNeed(self.resident, self.peak)


class WorkingMemory(Protocol):
    """Device memory that the budget divides. Used by the trainer's thread only."""

    def start(self) -> None:
        """Begins; called by the trainer's thread before anything else."""
        ...

    def begin(self, graphs: int, rest: int, *, alone: bool) -> GraphMemory | None:
        """Somebody is about to compute.

        Args:
            graphs, rest: bytes that an owner needs for captured steps, and for all else.
            alone: nobody else has anything there.

        Returns:
            Where to capture steps; None: nowhere.
        """
        ...

    def rest(self) -> int | None:
        """Bytes for all but captured steps; None: as many as are not needed for those."""
        ...

    def out_of_memory(self) -> None:
        """There was none left in the middle of a step: what nobody uses goes to the device, for serving to have it."""
        ...

    def end(self) -> None:
        """Nobody has anything there any more."""
        ...


class HostMemory:
    """Implements WorkingMemory where the trainer allocates as it goes, and captures nothing."""

    def start(self) -> None:
        """See WorkingMemory."""

    def begin(self, graphs: int, rest: int, *, alone: bool) -> None:
        """See WorkingMemory."""

    def rest(self) -> None:
        """See WorkingMemory."""

    def out_of_memory(self) -> None:
        """See WorkingMemory."""

    def end(self) -> None:
        """See WorkingMemory."""


class MemoryBudget:
    """Reserves before anything is allocated. Thread-safe.

    Args:
        total: bytes that the memory plan leaves for training.
        memory: what they are of.
    """

    def __init__(self, total: int, memory: WorkingMemory | None = None) -> None:
        self.total = total
        self._memory: WorkingMemory = HostMemory() if memory is None else memory
        self._lock = threading.Lock()
        self._needs: dict[str, MemoryNeed] = {}
        self._job_waits = False

    def start(self) -> None:
        """Begins; called by the trainer's thread before anything else."""
        self._memory.start()

    def reserve_job(self, need: MemoryNeed) -> GraphMemory | None:
        """The running job's; replaces what it had reserved before. By the trainer's thread.

        Returns:
            Where to capture steps; None: nowhere, they are to be launched kernel by kernel.

        Raises:
            MemoryTaken: sessions hold too much now. No session is let in before the job was, or gave up.
        """
        with self._lock:
            need, graphs = self._begun(need)
            others = {owner: held for owner, held in self._needs.items() if owner != _JOB}
            if _sum([*others.values(), need]) > self.total and others:
                self._job_waits = True
                raise MemoryTaken(
                    f"the job waits for memory: it needs {mib(need.resident)} and {mib(need.peak)} to compute, "
                    f"of {mib(self.total)} for training, of which {_held(others)}"
                )
            self._job_waits = False
            self._needs[_JOB] = need
            return graphs

    def hold_job(self, job_id: str) -> None:
        """The job that has reserved last keeps that while another one is prepared beside it."""
        with self._lock:
            if _JOB in self._needs:
                self._needs[f"{_JOB} {job_id}"] = self._needs.pop(_JOB)

    def release_job(self, job_id: str = "") -> None:
        """The job has ended, or gave up waiting.

        Args:
            job_id: as it was held; empty: it was not.
        """
        with self._lock:
            self._job_waits = False
            self._needs.pop(_JOB, None)
            self._needs.pop(f"{_JOB} {job_id}", None)

    def reserve_together(self, working: int) -> bool:
        """The jobs that are held are to be computed in one forward, which works in so many bytes; they may if this is
        true, until `release_together`. Never among captured steps."""
        with self._lock:
            others = [need for owner, need in self._needs.items() if owner != _TOGETHER]
            need, rest = MemoryNeed(0, working), self._memory.rest()
            resident = sum(held.resident for held in others)
            if _sum([*others, need]) > self.total or (rest is not None and resident + working > rest):
                return False
            self._needs[_TOGETHER] = need
            return True

    def release_together(self) -> None:
        """No two jobs are computed in one forward any more."""
        with self._lock:
            self._needs.pop(_TOGETHER, None)

    def settle(self) -> None:
        """Between two pieces of work, by the trainer's thread: if nobody holds anything, its memory is as it was."""
        with self._lock:
            if not self._needs:
                self._memory.end()

    def out_of_memory(self) -> None:
        """A step of the trainer's thread found no memory, and holds nothing any more."""
        self._memory.out_of_memory()

    def _begun(self, need: MemoryNeed) -> tuple[MemoryNeed, GraphMemory | None]:
        graphs = self._memory.begin(need.captured, need.resident + need.working, alone=not self._needs)
        return (need.uncaptured() if graphs is None else need), graphs

    def reserve_session(self, session_id: str, need: MemoryNeed) -> GraphMemory | None:
        """A session's; replaces what it had reserved before. See reserve_job().

        Raises:
            DoesNotFit: it is more than is left; the message has the byte plan.
            MemoryTaken: a job waits for memory.
        """
        with self._lock:
            others = {owner: held for owner, held in self._needs.items() if owner != session_id}
            if self._job_waits and session_id not in self._needs:
                raise MemoryTaken("a training job waits for the memory of open sessions; try again when it has ended")
            need, graphs = self._begun(need)
            if _sum([*others.values(), need]) > self.total:
                raise DoesNotFit(
                    f"the session needs {mib(need.resident)} for adapter, gradients and optimizer and "
                    f"{mib(need.peak)} to compute, and the memory plan leaves {mib(self.total)} for training, of "
                    f"which {_held(others)}: choose a lower lora.rank, fewer lora.target_modules, a lower "
                    'max_tokens_per_microbatch or recompute "full", or close another session',
                    param="lora.rank",
                )
            self._needs[session_id] = need
            return graphs

    def check_working(self, working: int, *, what: str, param: str) -> None:
        """One call needs this much to compute.

        Raises:
            DoesNotFit: it is more than the residents leave.
        """
        with self._lock:
            resident = sum(need.resident for need in self._needs.values()) + _captured(self._needs.values())
            if resident + working > self.total:
                raise DoesNotFit(
                    f"{what} needs {mib(working)} to compute, and the memory plan leaves {mib(self.total)} for "
                    f"training, of which {_held(self._needs)}: shorten it, or open the session with "
                    'recompute "full"',
                    param=param,
                )

    def release_session(self, session_id: str) -> None:
        """Gives a session's bytes back; none is fine."""
        with self._lock:
            self._needs.pop(session_id, None)

    def held(self) -> dict[str, MemoryNeed]:
        """Reservations by owner, for tests and logs."""
        with self._lock:
            return dict(self._needs)


def _sum(needs: list[MemoryNeed]) -> int:
    return sum(need.resident for need in needs) + max((need.working for need in needs), default=0) + _captured(needs)


def _captured(needs: Iterable[MemoryNeed]) -> int:
    return max((need.captured for need in needs), default=0)


def _held(needs: dict[str, MemoryNeed]) -> str:
    if not needs:
        return "nothing is held"
    sessions = [need for owner, need in needs.items() if not owner.startswith(_JOB)]
    jobs = [need for owner, need in needs.items() if owner.startswith(_JOB)]
    parts = []
    if sessions:
        parts.append(f"{len(sessions)} open session(s) hold {mib(sum(need.resident for need in sessions))}")
    if jobs:
        resident, peak = sum(need.resident for need in jobs), max(need.peak for need in jobs)
        running = sum(not owner.startswith(_TOGETHER) for owner in needs if owner.startswith(_JOB))
        who = f"{_JOB} holds" if running <= 1 else f"{running} running jobs hold"
        parts.append(f"{who} {mib(resident)} and {mib(peak)} to compute")
    return " and ".join(parts)
