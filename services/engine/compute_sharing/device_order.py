"""Sharing a device that works through queues: the order of decode steps and training pieces is kept on the device.

`gate.SliceGate` hands the device over on the host: the engine waits for the trainer's slice to end before it launches,
and for its step to end before it lets the trainer go on. On a GPU each handover leaves the device idle for some tenths
of a millisecond of a 3 ms step. Here both queue their work ahead, each behind what the other queued last: a step, then
as much training as the goal leaves, then the next step, back to back.

The trainer's pieces (a layer, a tile of the head) are measured on the device. It may queue one while it has credit:
each launch of a step brings what the step leaves of the goal for the time per output token, at least a minimal share of
the step. An idle engine leaves the device to the trainer, which then queues a few pieces ahead at most, for the next
step to be soon.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

_AHEAD = 2
"""Pieces queued on an idle device: the one at work, and the one that follows without a gap."""
_ENQUEUE_SECONDS = 0.0005
"""How long a step waits for a piece that is just being queued; one that takes longer runs beside it."""
_WEIGHT = 0.2
"""Of the newest step in the moving average of their times."""


class Mark(Protocol):
    """A point in a queue of the device."""

    def passed(self) -> bool:
        """Whether the device is beyond it."""
        ...

    def wait(self) -> None:
        """Returns when the device is beyond it; the thread sleeps."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that have been passed."""
        ...


class DeviceQueue(Protocol):
    """A queue of the device."""

    def mark(self) -> Mark:
        """The point behind all that is queued now."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is queued from now on starts behind the mark."""
        ...


@dataclass(frozen=True, slots=True)
class _Work:
    """A step or a piece between two marks."""

    begin: Mark
    end: Mark
    number: int = 0
    expected: float = 0.0
    """Seconds that it was taken for when it was queued."""

    def seconds(self) -> float:
        return self.end.seconds_since(self.begin)


class StreamGate:
    """Implements trainer.host.ComputeGate for one trainer thread and ports.EngineGate for the one engine loop thread.

    Args:
        tpot_goal_seconds: what a step and the training before it may take together.
        engine, trainer: the queues that the two threads use.
        minimal_share: of each step's duration, granted to training whatever the goal says.

    Raises:
        ValueError: the goal is not positive, or the share not in (0, 1].
    """

    contended = False
    """The engine's steps overlap as ever."""

    def __init__(
        self, tpot_goal_seconds: float, engine: DeviceQueue, trainer: DeviceQueue, *, minimal_share: float = 0.1
    ) -> None:
        if tpot_goal_seconds <= 0 or not 0 < minimal_share <= 1:
            raise ValueError(
                f"tpot_goal_seconds {tpot_goal_seconds} must be positive and minimal_share {minimal_share} in (0, 1]"
            )
        self.tpot_goal_seconds = tpot_goal_seconds
        """What a step and the training before it may take together."""
        self._share = minimal_share
        self._engine, self._trainer = engine, trainer
        self._changed = threading.Condition()
        self._engine_idle = True
        self._training = False
        self._queueing: Mark | None = None
        """Where the piece begins that the trainer is queueing now."""
        self._pieces: deque[_Work] = deque()
        """Of the trainer, queued and not known to be done; oldest first."""
        self._steps: deque[_Work] = deque()
        """The same of the engine."""
        self._engine_tail: Mark | None = None
        self._trainer_tail: Mark | None = None
        self._number = 0
        """Of the next piece since training() was entered."""
        self._measured: dict[int, float] = {}
        """Seconds of each piece by its number, as it was the last time: one microbatch is much like the one before. A
        number that is new is taken for the longest."""
        self._step_seconds: float | None = None
        self._grant = 0.0
        """What the last launch brought; no more is ever saved up."""
        self._credit = 0.0
        """Seconds of training that steps have left room for and that have not been queued yet."""
        self.training_waited = 0.0
        """Seconds that the trainer has waited for credit, since the start; for metrics."""

    # The engine.

    def acquire(self) -> None:
        """By the loop thread before the first of overlapping steps."""
        with self._changed:
            self._engine_idle = False

    def release(self, step_seconds: float) -> None:
        """By the loop thread when no step is in flight. What a step takes is measured on the device."""
        del step_seconds

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Around the launch of a step: it is queued behind the trainer's pieces, and brings credit for more."""
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
        """By the loop thread before it goes to sleep, or waits for a tier: training is unhindered until the next
        step."""
        with self._changed:
            self._engine_idle = True
            self._credit = 0.0
            self._changed.notify_all()

    # The trainer.

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around whatever the trainer queues; give_way() cuts it into pieces.

        Raises:
            RuntimeError: it is entered twice.
        """
        with self._changed:
            if self._training:
                raise RuntimeError("training() is entered twice")
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
        """Inside training(), before a piece is queued: returns when its turn has come.

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
        """What the next piece has to wait for."""
        if not self._measured and self._pieces:
            return self._pieces[0].end
        if not self._engine_idle:
            return None if self._credit > 0 else _Credit()
        return self._pieces[-_AHEAD].end if len(self._pieces) >= _AHEAD else None

    def _measure(self) -> None:
        """Takes note of what is done by now."""
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
    """The next launch of a step, or its end."""
