"""Who holds how much of the memory that the plan leaves for training: the running job and the open sessions.

Adapters, gradients and optimizer states stay for as long as their owner lives and add up. Working memory (activations,
logits) does not: one thread computes, and frees what it used before another owner's turn. On a GPU steps are captured,
and what a graph works in stays its owner's, so there everything adds up.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from services.common.errors import DoesNotFit, Unavailable
from services.trainer.memory import TrainingMemory, mib

_JOB = "the running job"


class MemoryTaken(Unavailable):
    """The job fits the plan, but not beside what open sessions hold now."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one owner."""

    resident: int
    """Masters, gradients, optimizer."""
    working: int
    """At the peak of a microbatch."""

    @classmethod
    def of(cls, memory: TrainingMemory, *, captured: bool) -> Need:
        """Of an estimate. Where steps are captured as CUDA graphs, their owner keeps what they compute in."""
        resident = memory.total if captured else memory.adapter
        return cls(resident, memory.total - resident)

    def __post_init__(self) -> None:
        if self.resident < 0 or self.working < 0:
            raise ValueError(f"bytes must not be negative: {self}")


class TrainingLedger:
    """Reserves before anything is allocated. Thread-safe.

    Args:
        total: bytes that the memory plan leaves for training.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._needs: dict[str, Need] = {}
        self._job_waits = False

    def reserve_job(self, need: Need) -> None:
        """The running job's; replaces what it had reserved before.

        Raises:
            MemoryTaken: sessions hold too much now. No session is let in before the job was, or gave up.
        """
        with self._lock:
            others = {owner: held for owner, held in self._needs.items() if owner != _JOB}
            if _sum([*others.values(), need]) > self.total and others:
                self._job_waits = True
                raise MemoryTaken(
                    f"the job waits for memory: it needs {mib(need.resident)} and {mib(need.working)} to compute, "
                    f"of {mib(self.total)} for training, of which {_held(others)}"
                )
            self._job_waits = False
            self._needs[_JOB] = need

    def release_job(self) -> None:
        """The job has ended, or gave up waiting."""
        with self._lock:
            self._job_waits = False
            self._needs.pop(_JOB, None)

    def reserve_session(self, session_id: str, need: Need) -> None:
        """A session's; replaces what it had reserved before.

        Raises:
            DoesNotFit: it is more than is left; the message has the byte plan.
            MemoryTaken: a job waits for memory.
        """
        with self._lock:
            others = {owner: held for owner, held in self._needs.items() if owner != session_id}
            if self._job_waits and session_id not in self._needs:
                raise MemoryTaken("a training job waits for the memory of open sessions; try again when it has ended")
            if _sum([*others.values(), need]) > self.total:
                raise DoesNotFit(
                    f"the session needs {mib(need.resident)} for adapter, gradients and optimizer and "
                    f"{mib(need.working)} to compute, and the memory plan leaves {mib(self.total)} for training, of "
                    f"which {_held(others)}: choose a lower lora.rank, fewer lora.target_modules, a lower "
                    'max_tokens_per_microbatch or recompute "full", or close another session',
                    param="lora.rank",
                )
            self._needs[session_id] = need

    def check_working(self, working: int, *, what: str, param: str) -> None:
        """One call needs this much to compute.

        Raises:
            DoesNotFit: it is more than the residents leave.
        """
        with self._lock:
            resident = sum(need.resident for need in self._needs.values())
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

    def held(self) -> dict[str, Need]:
        """By owner, for tests and logs."""
        with self._lock:
            return dict(self._needs)


def _sum(needs: list[Need]) -> int:
    return sum(need.resident for need in needs) + max((need.working for need in needs), default=0)


def _held(needs: dict[str, Need]) -> str:
    if not needs:
        return "nothing is held"
    sessions = [need for owner, need in needs.items() if owner != _JOB]
    parts = []
    if sessions:
        parts.append(f"{len(sessions)} open session(s) hold {mib(sum(need.resident for need in sessions))}")
    if _JOB in needs:
        parts.append(f"{_JOB} holds {mib(needs[_JOB].resident)} and {mib(needs[_JOB].working)} to compute")
    return " and ".join(parts)
