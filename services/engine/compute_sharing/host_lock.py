"""SliceGate: the compute gate of a CPU. Decode steps and training take turns on the host.

The engine takes the gate for each step, or, while nobody trains, for as long as its steps overlap. The trainer holds
the gate while it computes and offers it back between layers.

A busy engine still lets the trainer have a slice after each step, so long as the step and the wait for the slice stay
within the goal for the time per output token, and a minimal share of the step's time even if the goal is out of reach.
A layer can overrun its slice; the overrun is a debt that later slices pay. An idle engine leaves the device to the
trainer and gets it back at the next layer.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from services.engine.compute_sharing.entrance import Entrance


class _Turn(enum.Enum):
    NOBODY = enum.auto()
    ENGINE = enum.auto()
    TRAINER = enum.auto()


class SliceGate:
    """Compute gate of a CPU: ComputeGate for the trainer's thread and its guests, EngineGate for the one loop thread.

    Args:
        tpot_goal_seconds: goal for the time of a step and the training slice before it together.
        minimal_share: share of each step's duration that training gets whatever the goal is.
        synchronize: waits until the device has done what the trainer queued (CUDA); None where calls return when
            the work is done.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tpot_goal_seconds: float,
        *,
        minimal_share: float = 0.1,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if tpot_goal_seconds <= 0 or not 0 < minimal_share <= 1:
            raise ValueError(
                f"tpot_goal_seconds {tpot_goal_seconds} must be positive and minimal_share {minimal_share} in (0, 1]"
            )
        self.tpot_goal_seconds = tpot_goal_seconds
        """Goal for the time of a step and the training slice before it together."""
        self._share = minimal_share
        self._synchronize = synchronize
        self._clock = clock
        self._entrance = Entrance()
        self._changed = threading.Condition()
        self._turn = _Turn.NOBODY
        self._engine_idle = True
        self._engine_waits_since: float | None = None
        self._trainer_waits = False
        self._training = False
        """True while a thread is inside training()."""
        self._credit = 0.0
        """Seconds that the trainer may make the engine wait; negative: it has overrun."""
        self.training_waited = 0.0
        """Seconds that the trainer has waited for its turns, since the start; for metrics."""

    @property
    def contended(self) -> bool:
        """True while a thread computes in ``training()`` or waits there: the engine should release the gate after each
        step."""
        return self._training

    def acquire(self) -> None:
        """Takes the gate for the engine; waits for the trainer's slice to end. Called by the loop thread before it
        launches a step on an idle device."""
        with self._changed:
            if self._turn is _Turn.ENGINE or self._engine_waits_since is not None:
                raise RuntimeError("two engine steps at the same time")
            self._engine_idle = False
            self._engine_waits_since = self._clock()
            try:
                while self._turn is not _Turn.NOBODY:
                    self._changed.wait()
                self._turn = _Turn.ENGINE
            finally:
                self._engine_waits_since = None

    def release(self, step_seconds: float) -> None:
        """Releases the gate. Called by the loop thread when the results of all its steps are in.

        Args:
            step_seconds: duration of the last step, by which the trainer's next slice is measured.
        """
        with self._changed:
            grant = max(self.tpot_goal_seconds - step_seconds, self._share * step_seconds)
            self._credit = min(self._credit + grant, grant)
            # Handed to the trainer directly: otherwise the next step could be faster than its thread.
            self._turn = _Turn.TRAINER if self._trainer_waits and self._credit > 0 else _Turn.NOBODY
            self._changed.notify_all()

    def launching(self) -> AbstractContextManager[None]:
        """Context manager around each launch of a step, which holds the gate already."""
        return nullcontext()

    def engine_idle(self) -> None:
        """Gives the device to the trainer until the next step, which then waits for one layer only. Called by the loop
        thread before it sleeps or waits for a tier."""
        with self._changed:
            self._engine_idle = True
            self._credit = 0.0
            self._changed.notify_all()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager that a thread holds while it trains; entering waits for another thread that does, and for the
        engine's turn to end.

        Raises:
            RuntimeError: a thread enters it twice.
        """
        with self._entrance.passed():
            with self._changed:
                self._training = True
                self._await_turn()
            try:
                yield
            finally:
                try:
                    self._finish_work()
                finally:
                    with self._changed:
                        self._training = False
                        self._end_slice()

    def give_way(self) -> None:
        """Called inside training() between layers: lets a waiting engine step run when the slice is used up.

        Not always by the thread that entered training(): on CUDA, autograd runs the backward pass on its own thread.
        """
        if not self._training:
            raise RuntimeError("give_way() is called outside training()")
        if self._engine_idle:
            return
        self._finish_work()
        with self._changed:
            since = self._engine_waits_since
            if since is None or self._clock() - since < self._credit:
                return
            self._end_slice()
            self._await_turn()

    def _finish_work(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def _await_turn(self) -> None:
        self._trainer_waits = True
        began = self._clock()
        try:
            while not self._trainer_may_run():
                self._changed.wait()
            self._turn = _Turn.TRAINER
        finally:
            self._trainer_waits = False
            self.training_waited += self._clock() - began

    def _trainer_may_run(self) -> bool:
        if self._turn is not _Turn.NOBODY:
            return self._turn is _Turn.TRAINER
        return self._engine_waits_since is None and (self._engine_idle or self._credit > 0)

    def _end_slice(self) -> None:
        if self._engine_waits_since is not None:
            self._credit -= self._clock() - self._engine_waits_since
        self._turn = _Turn.NOBODY
        self._changed.notify_all()
