"""The order of one session's calls: strictly by sequence number, each once, however they arrive. Plain Python.

Not thread-safe: the manager holds its lock around every call.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.errors import Conflict, InvalidRequest, Overloaded, TemperError

T = TypeVar("T")
_AHEAD = 10_000
"""Most numbers by which a sequence number may be ahead of the next one."""
_REMEMBERED = 4096
"""Executed calls whose digest is kept, so that a repeated one is known."""


class CallState(enum.StrEnum):
    """State of a call."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class QueuedCall(Generic[T]):
    """One call in the queue."""

    id: str
    seq: int
    digest: str
    kind: str
    tokens: int
    call: T | None
    """None once it has ended: data may be megabytes."""
    submitted: float
    state: CallState = CallState.PENDING
    started: bool = False
    result: bytes | None = None
    """JSON; None while pending, when failed, and when it was dropped to make room."""
    error: BaseException | None = None
    ended: float = 0.0
    watchers: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CallQueueLimits:
    """Bounds of one session."""

    pending: int
    """Calls that wait or run."""
    pending_tokens: int
    gap_seconds: float
    """Seconds that a call waits for an earlier one that never came."""
    results: int
    """Ended calls whose results are kept."""
    result_seconds: float


class CallQueue(Generic[T]):
    """Calls of one session.

    Args:
        new_id: makes a future's id of a sequence number.
        clock: monotonic seconds.
    """

    def __init__(self, limits: CallQueueLimits, new_id: Callable[[int], str], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._new_id = new_id
        self._clock = clock
        self._next = 1
        self._free_since = clock()
        self._waiting: dict[int, QueuedCall[T]] = {}
        self._running: QueuedCall[T] | None = None
        self._ended: OrderedDict[str, QueuedCall[T]] = OrderedDict()
        """Ended calls by future id, oldest first."""
        self._executed: OrderedDict[int, tuple[str, str]] = OrderedDict()
        """Sequence number → digest and future id of calls that have begun."""

    @property
    def next_seq(self) -> int:
        """Sequence number of the next call to begin."""
        return self._next

    @property
    def running(self) -> QueuedCall[T] | None:
        return self._running

    @property
    def pending(self) -> int:
        """Calls that wait or run."""
        return len(self._waiting) + (self._running is not None)

    def submit(self, seq: int, digest: str, kind: str, call: T, tokens: int) -> QueuedCall[T] | str:
        """Puts a call in its place. The same number with the same digest gives the same entry.

        Returns:
            The entry, or only the future's id where a repeated call's result is not kept any more.

        Raises:
            Conflict: the number was used with another body, or so long ago that nobody remembers.
            Overloaded: too many calls wait, or too many tokens.
            InvalidRequest: the number is far ahead.
        """
        known = self._known(seq)
        if known is not None:
            if known[0] != digest:
                raise Conflict(
                    f"seq {seq} was used for another call of this session; the next free one is {self._free_seq()}",
                    param="seq",
                )
            return self.find(known[1]) or known[1]
        if seq < self._next:
            raise Conflict(f"seq {seq} was executed long ago; the next one is {self._free_seq()}", param="seq")
        if seq > self._next + _AHEAD:
            raise InvalidRequest(f"seq {seq} is far ahead: the next call of this session is {self._next}", param="seq")
        # The next one is always let in: those that wait, wait for it.
        if seq != self._next and self.pending >= self._limits.pending:
            raise Overloaded(
                f"{self.pending} calls of this session wait already; wait for their futures first", retry_after=1.0
            )
        waiting = sum(entry.tokens for entry in self._waiting.values())
        if seq != self._next and waiting + tokens > self._limits.pending_tokens:
            raise Overloaded(
                f"calls with {waiting} tokens wait in this session already, and it may have "
                f"{self._limits.pending_tokens} waiting; wait for their futures first",
                retry_after=1.0,
            )
        entry = QueuedCall(self._new_id(seq), seq, digest, kind, tokens, call, self._clock())
        self._waiting[seq] = entry
        return entry

    def begin(self) -> QueuedCall[T] | None:
        """The next call, if it is there and none runs; it runs from now on."""
        if self._running is not None or self._next not in self._waiting:
            return None
        entry = self._waiting.pop(self._next)
        self._executed[entry.seq] = entry.digest, entry.id
        while len(self._executed) > _REMEMBERED:
            self._executed.popitem(last=False)
        self._next += 1
        entry.started = True
        self._running = entry
        return entry

    def end(self, entry: QueuedCall[T], result: bytes | None, error: BaseException | None) -> list[Callable[[], None]]:
        """The running call has ended. Returns whom to tell, outside of any lock.

        Raises:
            ValueError: it is not the running one.
        """
        if entry is not self._running:
            raise ValueError(f"call {entry.seq} does not run")
        self._running = None
        self._free_since = self._clock()
        return self._settle(entry, result, error)

    def fail_all(self, error: TemperError) -> list[Callable[[], None]]:
        """Every call that has not ended fails, also a running one, whose end is not waited for."""
        told: list[Callable[[], None]] = []
        left = [*self._waiting.values(), *([self._running] if self._running is not None else [])]
        self._waiting.clear()
        self._running = None
        for entry in left:
            told += self._settle(entry, None, error)
        return told

    def sweep(self) -> list[Callable[[], None]]:
        """Fails calls that waited too long for a missing one, and drops old results. Returns whom to tell."""
        now = self._clock()
        told: list[Callable[[], None]] = []
        if self._running is None and self._next not in self._waiting:
            patience = self._limits.gap_seconds
            late = [e for e in self._waiting.values() if now - max(e.submitted, self._free_since) >= patience]
            for entry in late:
                del self._waiting[entry.seq]
                error = Conflict(
                    f"seq {entry.seq} waited {patience:g} s for seq {self._next}, which never came: send that one, and "
                    f"then seq {entry.seq} again (it was not executed)",
                    param="seq",
                )
                told += self._settle(entry, None, error)
        for entry in list(self._ended.values()):
            if now - entry.ended < self._limits.result_seconds:
                break
            del self._ended[entry.id]
        return told

    def find(self, future: str) -> QueuedCall[T] | None:
        """Call of a future's id; None if it is unknown or forgotten."""
        if (found := self._ended.get(future)) is not None:
            return found
        if self._running is not None and self._running.id == future:
            return self._running
        return next((entry for entry in self._waiting.values() if entry.id == future), None)

    def executed(self, future: str) -> bool:
        """Whether this was a call whose result has been dropped."""
        return any(known == future for _, known in self._executed.values())

    def ahead_of(self, entry: QueuedCall[T]) -> int:
        """Calls that are there and come before a waiting one."""
        return sum(seq < entry.seq for seq in self._waiting) + (self._running not in (None, entry))

    def missing_before(self, entry: QueuedCall[T]) -> int | None:
        """The first sequence number that a waiting call waits for and that nobody has sent."""
        if entry.started:
            return None
        return next((seq for seq in range(self._next, entry.seq) if seq not in self._waiting), None)

    def _free_seq(self) -> int:
        return max([self._next - 1, *self._waiting]) + 1

    def _known(self, seq: int) -> tuple[str, str] | None:
        entry = self._waiting.get(seq)
        return (entry.digest, entry.id) if entry is not None else self._executed.get(seq)

    def _settle(
        self, entry: QueuedCall[T], result: bytes | None, error: BaseException | None
    ) -> list[Callable[[], None]]:
        entry.state = CallState.DONE if error is None else CallState.FAILED
        entry.result, entry.error, entry.call, entry.ended = result, error, None, self._clock()
        self._ended[entry.id] = entry
        while len(self._ended) > self._limits.results:
            self._ended.popitem(last=False)
        told, entry.watchers = entry.watchers, []
        return told
