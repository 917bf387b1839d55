"""StreamGate: the compute gate of a GPU. The order of decode steps and training pieces is kept on the device.

`host_lock.SliceGate` hands the device over on the host: the engine waits for the trainer's slice to end before it
launches, and for its step to end before it lets the trainer continue. On a GPU each handover leaves the device idle for
some tenths of a millisecond of a 3 ms step. Here both queue their work ahead, each behind what the other queued last: a
step, then as much training as the goal leaves, then the next step, back to back.

The trainer's pieces (a layer, a tile of the head) are measured on the device. The trainer may queue one while it has
credit. Each launch of a step adds as credit what the step leaves of the goal for the time per output token, at least a
minimal share of the step. While the engine is idle, the trainer has the device and queues only a few pieces ahead, so
that the next step starts soon.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from services.engine.compute_sharing.entrance import Entrance

_AHEAD = 2
"""Most pieces queued while the engine is idle: the running one, and the one that follows without a gap."""
_ENQUEUE_SECONDS = 0.0005
"""Longest wait of a step for a piece that is being queued; a longer one runs concurrently."""
_WEIGHT = 0.2
"""Weight of the newest step in the moving average of step times."""


class Mark(Protocol):
    """Mark: a point in a queue of the device. It is a Protocol because the CUDA implementation needs torch and this
    module does not."""

    def passed(self) -> bool:
        """True if the device is past the mark."""
        ...

    def wait(self) -> None:
        """Returns when the device is past the mark; the thread sleeps."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds of device time between two passed marks."""
        ...


class DeviceQueue(Protocol):
    """Queue of the device. It is a Protocol for the same reason as Mark."""

    def mark(self) -> Mark:
        """Mark behind all work that is queued now."""
        ...

    def follow(self, mark: Mark) -> None:
        """Makes all work that is queued from now on start behind the mark."""
        ...


@dataclass(frozen=True, slots=True)
class _Work:
    """Step or piece between two marks."""

    begin: Mark
    end: Mark
    number: int = 0
    expected: float = 0.0
    """Expected seconds when it was queued."""

    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)


class StreamGate:
    """Compute gate of a GPU: ComputeGate for the trainer's thread and its guests, EngineGate for the one loop thread.

    Args:
        tpot_goal_seconds: goal for the time of a step and the training before it together.
        engine, trainer: the queues that the two threads use.
        minimal_share: share of each step's duration that training gets whatever the goal is.

    Raises:
        ValueError: the goal is not positive, or the share not in (0, 1].
    """

    contended = False
    """False: the engine's steps overlap while a trainer computes."""

    def __init__(
        self, tpot_goal_seconds: float, engine: DeviceQueue, trainer: DeviceQueue, *, minimal_share: float = 0.1
    ) -> None:
        if tpot_goal_seconds <= 0 or not 0 < minimal_share <= 1:
            raise ValueError(
                f"tpot_goal_seconds {tpot_goal_seconds} must be positive and minimal_share {minimal_share} in (0, 1]"
            )
        self.tpot_goal_seconds = tpot_goal_seconds
        """Goal for the time of a step and the training before it together."""
        self._share = minimal_share
        self._engine, self._trainer = engine, trainer
        self._entrance = Entrance()
        self._changed = threading.Condition()
        self._engine_idle = True
        self._training = False
        self._queueing: Mark | None = None
        """Begin of the piece that the trainer is queueing now; None: it queues none."""
        self._pieces: deque[_Work] = deque()
        """Pieces of the trainer that are queued and not known to be done, oldest first."""
        self._steps: deque[_Work] = deque()
        """Steps of the engine that are queued and not known to be done, oldest first."""
        self._engine_tail: Mark | None = None
        self._trainer_tail: Mark | None = None
        self._number = 0
        """Number of the next piece, counted since training() was entered."""
        self._measured: dict[int, float] = {}
        """Latest seconds of each piece by its number: microbatches are much alike. A new number is expected to take as
        long as the longest."""
        self._step_seconds: float | None = None
        self._grant = 0.0
        """Credit that the last launch added, which is also the most that is saved up."""
        self._credit = 0.0
        """Seconds of training that steps have left room for and that have not been queued yet."""
        self.training_waited = 0.0
        """Seconds that the trainer has waited for credit, since the start; for metrics."""

    # The engine.

    def acquire(self) -> None:
        """Ends the engine's idle time; called by the loop thread before the first of overlapping steps."""
        with self._changed:
            self._engine_idle = False

    def release(self, step_seconds: float) -> None:
        """Does nothing: the duration of a step is measured on the device. Called by the loop thread when no step is in
        flight."""
        del step_seconds

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context manager around the launch of a step: it is queued behind the trainer's pieces, and adds credit for
        more."""
        with self._changed:
            if self._queueing is not None:
                self._changed.wait_for(lambda: self._queueing is None, _ENQUEUE_SECONDS)
            if self._trainer_tail is not None:
                self._engine.follow(self._trainer_tail)
        begin = self._engine.mark()
        try:
            yield
        finally:
            with self._changed:
                self._engine_tail = self._engine.mark()
                self._steps.append(_Work(begin, self._engine_tail))
                self._measure()
                if (step := self._step_seconds) is not None:
                    self._grant = max(self.tpot_goal_seconds - step, self._share * step)
                    self._credit = min(self._credit + self._grant, self._grant)
                self._changed.notify_all()

    def engine_idle(self) -> None:
        """Gives the device to the trainer until the next step. Called by the loop thread before it sleeps or waits for
        a tier."""
        with self._changed:
            self._engine_idle = True
            self._credit = 0.0
            self._changed.notify_all()

    # The trainer.

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager around a thread's training; give_way() divides it into pieces. Entering waits for another
        thread that trains.

        Raises:
            RuntimeError: a thread enters it twice.
        """
        with self._entrance.passed():
            with self._changed:
                self._training = True
                self._number = 0
            try:
                self.give_way()
                yield
            finally:
                with self._changed:
                    self._end_piece()
                    self._training = False

    def give_way(self) -> None:
        """Waits until the next piece may be queued. Called inside training(), before each piece.

        Raises:
            RuntimeError: called outside training().
        """
        with self._changed:
            if not self._training:
                raise RuntimeError("give_way() is called outside training()")
            self._end_piece()
            while (ahead := self._blocked_by()) is not None:
                if isinstance(ahead, _Credit):
                    began = time.monotonic()
                    self._changed.wait()
                    self.training_waited += time.monotonic() - began
                else:
                    self._changed.release()
                    try:
                        ahead.wait()
                    finally:
                        self._changed.acquire()
                self._measure()
            if self._engine_tail is not None:
                self._trainer.follow(self._engine_tail)
            self._queueing = self._trainer.mark()

    def _end_piece(self) -> None:
        if self._queueing is not None:
            self._trainer_tail = self._trainer.mark()
            expected = self._measured.get(self._number) or max(self._measured.values(), default=0.0)
            self._pieces.append(_Work(self._queueing, self._trainer_tail, self._number, expected))
            self._credit -= expected
            self._number += 1
            self._queueing = None
            self._changed.notify_all()
        self._measure()

    def _blocked_by(self) -> Mark | _Credit | None:
        """Mark or credit that the next piece has to wait for; None: it may be queued."""
        if not self._measured and self._pieces:
            return self._pieces[0].end
        if not self._engine_idle:
            return None if self._credit > 0 else _Credit()
        return self._pieces[-_AHEAD].end if len(self._pieces) >= _AHEAD else None

    def _measure(self) -> None:
        """Measures the pieces and steps that are done."""
        while self._pieces and self._pieces[0].end.passed():
            piece = self._pieces.popleft()
            seconds = self._measured[piece.number] = piece.seconds()
            self._credit = min(self._credit + piece.expected - seconds, self._grant)
        while self._steps and self._steps[0].end.passed():
            seconds = self._steps.popleft().seconds()
            before = self._step_seconds
            self._step_seconds = seconds if before is None else (1 - _WEIGHT) * before + _WEIGHT * seconds


@dataclass(frozen=True, slots=True)
class _Credit:
    """Wait for credit, which the next launch or end of a step brings."""
