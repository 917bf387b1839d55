"""Steps and training pieces in the order that the device gets them: real threads, a device that only the test moves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import pytest

from services.engine.compute_sharing.device_order import Mark, StreamGate

TIMEOUT = 30.0
GOAL = 6.0


class Device:
    """Two queues; time passes when somebody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, float, float]] = []
        """(work, begin, end) of everything that ran."""
        self.changed = threading.Condition()

    def advance(self, to: float) -> None:
        with self.changed:
            self.now = max(self.now, to)
            self.changed.notify_all()


class FakeMark:
    def __init__(self, device: Device, time: float) -> None:
        self.device, self.time = device, time

    def passed(self) -> bool:
        return self.time <= self.device.now

    def wait(self) -> None:
        with self.device.changed:
            assert self.device.changed.wait_for(self.passed, TIMEOUT)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, FakeMark)
        assert self.passed()
        return self.time - earlier.time


class FakeLane:
    def __init__(self, device: Device) -> None:
        self.device, self.end = device, 0.0

    def mark(self) -> FakeMark:
        self.end = max(self.end, self.device.now)
        return FakeMark(self.device, self.end)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        self.end = max(self.end, mark.time)

    def work(self, what: str, seconds: float) -> None:
        begin = max(self.end, self.device.now)
        self.end = begin + seconds
        self.device.log.append((what, begin, self.end))


class Stage:
    """A gate over a device, with its trainer in a thread."""

    def __init__(self, **options: float) -> None:
        self.device = Device()
        self.engine, self.trainer = FakeLane(self.device), FakeLane(self.device)
        self.gate = StreamGate(GOAL, self.engine, self.trainer, **options)
        self.queued = 0
        self._trainer: threading.Thread | None = None
        self._error: BaseException | None = None

    def step(self, seconds: float) -> None:
        self.gate.acquire()
        with self.gate.launching():
            self.engine.work("step", seconds)

    def train(self, pieces: int, seconds: float) -> threading.Thread:
        return self.train_pieces([seconds] * pieces)

    def train_pieces(self, durations: Sequence[float]) -> threading.Thread:
        def run() -> None:
            try:
                with self.gate.training():
                    for index, seconds in enumerate(durations):
                        if index:
                            self.gate.give_way()
                        self.trainer.work("piece", seconds)
                        self.queued += 1
            except BaseException as error:
                self._error = error

        thread = threading.Thread(target=run, daemon=True)
        self._trainer = thread
        thread.start()
        return thread

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the trainer's thread."""
        deadline = threading.Event()
        for _ in range(int(TIMEOUT / 0.002)):
            if condition() or self._error:
                break
            deadline.wait(0.002)
        assert self._error is None
        assert condition()

    def finish(self, thread: threading.Thread) -> None:
        """Leaves the device to the trainer until it is done."""
        self.gate.engine_idle()
        for _ in range(int(TIMEOUT / 0.002)):
            if not thread.is_alive():
                break
            self.device.advance(self.device.now + 1000.0)
            thread.join(0.002)
        assert not thread.is_alive()
        assert self._error is None

    def settled(self) -> int:
        """Number of queued pieces once the trainer waits."""
        changed = (self.gate._changed, self.device.changed)
        thread = self._trainer
        # Who is told of a change is among the waiting no more until it has looked and waits again.
        self.until(lambda: any(one._waiters for one in changed) or thread is None or not thread.is_alive())  # type: ignore[attr-defined]
        return self.queued


def test_an_idle_device_has_the_trainer_two_pieces_ahead() -> None:
    stage = Stage()
    thread = stage.train(5, 1.0)
    assert stage.settled() == 1, "nobody knows yet how long a piece takes"
    stage.device.advance(1.0)
    stage.until(lambda: stage.queued == 3)
    assert stage.settled() == 3
    stage.device.advance(2.0)
    stage.until(lambda: stage.queued == 4)
    assert stage.settled() == 4
    stage.device.advance(10.0)
    stage.until(lambda: stage.queued == 5)
    thread.join(TIMEOUT)
    # Without a gap.
    assert [begin for _, begin, _ in stage.device.log[:4]] == [0.0, 1.0, 2.0, 3.0]


def test_steps_and_pieces_follow_each_other_and_the_goal_is_kept() -> None:
    stage = Stage()
    stage.step(2.0)
    thread = stage.train(100, 1.0)
    times: list[float] = []
    for _ in range(8):
        stage.settled()
        stage.step(2.0)  # the engine launches one step ahead
        times.append(stage.device.log[-1][1])
        stage.device.advance(times[-1])
    stage.finish(thread)
    between = [after - before for before, after in itertools.pairwise(times[2:])]
    # A step of 2 leaves 4 of 6 for pieces of 1, give or take one that overran its credit.
    assert all(GOAL - 1.0 <= seconds <= GOAL + 1.0 for seconds in between), between
    assert sum(between) / len(between) == pytest.approx(GOAL, abs=0.3)
    spans = sorted(stage.device.log[:40], key=lambda entry: entry[1])
    for (_, _, end), (_, begin, _) in itertools.pairwise(spans):
        assert begin >= end, "a step and a piece at the same time"


def test_a_goal_out_of_reach_leaves_training_its_minimal_share() -> None:
    stage = Stage(minimal_share=0.5)
    stage.step(10.0)
    thread = stage.train(1000, 1.0)
    for _ in range(6):
        stage.settled()
        stage.step(10.0)
        stage.device.advance(stage.device.log[-1][1])
    pieces = sum(what == "piece" for what, _, _ in stage.device.log)
    assert 3 * 5 <= pieces <= 8 * 6
    stage.finish(thread)


def test_without_credit_the_trainer_waits_for_the_next_step() -> None:
    stage = Stage()
    stage.step(2.0)
    thread = stage.train(3, 50.0)
    assert stage.settled() == 0, "nobody knows yet what a step takes"
    stage.device.advance(2.0)
    stage.step(2.0)
    assert stage.settled() == 1
    stage.device.advance(60.0)
    stage.step(2.0)
    assert stage.settled() == 1, "a piece of 50 is a debt of many steps"
    stage.finish(thread)
    assert stage.gate.training_waited > 0
    assert stage.queued == 3


def test_nothing_is_waited_for_on_an_idle_device() -> None:
    stage = Stage()
    with stage.gate.training():
        stage.gate.give_way()
    assert stage.gate.training_waited == 0


def test_misuse_is_refused() -> None:
    stage = Stage()
    with pytest.raises(RuntimeError, match="outside"):
        stage.gate.give_way()
    with stage.gate.training(), pytest.raises(RuntimeError, match="twice"), stage.gate.training():
        pass
    with stage.gate.training():
        pass
    for goal, share in ((0.0, 0.1), (1.0, 0.0), (1.0, 1.5)):
        with pytest.raises(ValueError, match="positive"):
            StreamGate(goal, stage.engine, stage.trainer, minimal_share=share)


def test_an_exception_ends_training() -> None:
    stage = Stage()
    with pytest.raises(InterruptedError), stage.gate.training():
        raise InterruptedError
    with stage.gate.training():
        stage.gate.give_way()


def test_pieces_of_nearly_nothing_do_not_let_a_burst_of_long_ones_through() -> None:
    stage = Stage()
    durations = [1.0, *[0.001] * 3, *[1.0] * 40]
    thread = stage.train_pieces(durations)
    stage.device.advance(1.1)
    stage.step(2.0)
    for _ in range(12):
        stage.settled()
        stage.step(2.0)
        stage.device.advance(stage.device.log[-1][1])
    steps = [entry for entry in stage.device.log if entry[0] == "step"]
    gaps = [after[1] - ahead[2] for ahead, after in itertools.pairwise(steps)]
    # 4 of 6 are left by a step: never more than that and one piece.
    assert max(gaps) <= GOAL - 2.0 + 1.0, gaps
    stage.finish(thread)
