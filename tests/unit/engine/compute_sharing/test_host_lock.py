"""SliceGate: real threads, a clock that only the test moves, and the order of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from services.engine.compute_sharing.host_lock import SliceGate

TIMEOUT = 30.0
GOAL = 1.0


@contextmanager
def engine_step(gate: SliceGate, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Calls of the loop for a step that overlaps with no other."""
    gate.acquire()
    started = clock()
    try:
        yield
    finally:
        gate.release(clock() - started)


class Stage:
    """A gate with a hand-moved clock and a log of who did what."""

    def __init__(self, **options: float) -> None:
        self.now = 0.0
        self.gate = SliceGate(GOAL, clock=lambda: self.now, **options)
        self.log: list[str] = []
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.computing = 0

    def start(self, function: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def engine_step(self) -> AbstractContextManager[None]:
        return engine_step(self.gate, lambda: self.now)

    def compute(self, what: str, seconds: float) -> None:
        self.computing += 1
        assert self.computing == 1, "engine and trainer compute at the same time"
        self.log.append(what)
        self.now += seconds
        self.computing -= 1

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state of the gate, which announces its changes only to itself."""
        for _ in range(int(TIMEOUT * 1000)):
            with self.gate._changed:
                if condition():
                    return
            threading.Event().wait(0.001)
        raise AssertionError(f"never happened; log {self.log}, errors {self.errors}")

    def until_engine_waits(self) -> None:
        self.wait_until(lambda: self.gate._engine_waits_since is not None)

    def until_trainer_waits(self) -> None:
        self.wait_until(lambda: self.gate._trainer_waits)

    def finish(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        assert not self.errors, self.errors


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.finish()


def test_alone_each_side_is_unhindered(stage: Stage) -> None:
    for _ in range(3):
        with stage.engine_step():
            stage.compute("step", 0.1)
    stage.gate.engine_idle()
    with stage.gate.training():
        for _ in range(3):
            stage.compute("layer", 10.0)
            stage.gate.give_way()
    with stage.engine_step():
        stage.compute("step", 0.1)
    assert stage.log == ["step"] * 3 + ["layer"] * 3 + ["step"]


def test_after_idling_the_engine_waits_for_one_layer_only(stage: Stage) -> None:
    def engine() -> None:
        with stage.engine_step():
            stage.compute("step", 0.1)
        stage.gate.engine_idle()

    with stage.gate.training():
        for _ in range(5):
            stage.compute("layer", 0.01)
            stage.gate.give_way()
        stage.start(engine)
        stage.until_engine_waits()
        stage.compute("layer", 0.01)
        stage.gate.give_way()
        stage.compute("layer", 0.01)
    assert stage.log == ["layer"] * 6 + ["step", "layer"]


def test_what_the_trainer_waits_is_counted(stage: Stage) -> None:
    def trainer() -> None:
        with stage.gate.training():
            stage.compute("layer", 7.0)

    with stage.engine_step():
        stage.start(trainer)
        stage.until_trainer_waits()
        stage.compute("step", 0.25)
    stage.finish()
    assert stage.gate.training_waited == pytest.approx(0.25)


def test_a_busy_engine_and_the_trainer_alternate_within_the_goal(stage: Stage) -> None:
    """Steps of 0.4 s leave 0.6 s of the goal: six layers of 0.1 s after each step."""
    steps = 5

    def engine() -> None:
        for _ in range(steps):
            with stage.engine_step():
                # The trainer must be there before the step ends, as it is when it computes all the time.
                stage.until_trainer_waits()
                stage.compute("step", 0.4)
        stage.gate.engine_idle()

    with stage.gate.training():
        thread = stage.start(engine)
        stage.until_engine_waits()
        while stage.log.count("step") < steps:
            stage.compute("layer", 0.1)
            # A busy engine comes back long before a layer ends.
            stage.until_engine_waits()
            stage.gate.give_way()
    thread.join(TIMEOUT)
    text = "".join("S" if what == "step" else "l" for what in stage.log)
    slices = text.split("S")
    assert text.count("S") == steps
    assert slices[0] == "l"
    # The engine's wait begins while the first layer computes, so a slice is six or seven layers long.
    assert all(5 <= len(part) <= 7 for part in slices[1:-1]), text


def test_a_goal_out_of_reach_leaves_training_a_minimal_share() -> None:
    """Steps of 10 s against a goal of 1 s: training still gets about a tenth of the time, overruns are paid back."""
    stage = Stage(minimal_share=0.1)
    steps = 12

    def engine() -> None:
        for _ in range(steps):
            with stage.engine_step():
                stage.until_trainer_waits()
                stage.compute("step", 10.0)
        stage.gate.engine_idle()

    with stage.gate.training():
        stage.start(engine)
        stage.until_engine_waits()
        while stage.log.count("step") < steps:
            stage.compute("layer", 3.0)
            stage.until_engine_waits()
            stage.gate.give_way()
    stage.finish()
    layers = stage.log.count("layer")
    # 12 steps grant 12 s, layers take 3 s each: the first one is before any grant.
    assert 3 <= layers <= 6, stage.log
    assert "layer" in stage.log[2:]


def test_a_slice_is_handed_over_even_to_a_slow_thread(stage: Stage) -> None:
    """The next step cannot overtake the trainer that waits, however fast the loop comes back."""

    def trainer() -> None:
        for _ in range(3):
            with stage.gate.training():
                stage.compute("layer", 0.1)

    thread: threading.Thread | None = None
    with stage.engine_step():
        thread = stage.start(trainer)
        stage.until_trainer_waits()
        stage.compute("step", 0.1)
    with stage.engine_step():
        stage.compute("step", 0.1)
    stage.gate.engine_idle()
    thread.join(TIMEOUT)
    assert stage.log[:2] == ["step", "layer"]
    assert sorted(stage.log) == ["layer"] * 3 + ["step"] * 2


def test_a_trainer_that_leaves_lets_the_waiting_engine_first(stage: Stage) -> None:
    def engine() -> None:
        with stage.engine_step():
            stage.compute("step", 0.1)
        stage.gate.engine_idle()

    with stage.gate.training():
        stage.start(engine)
        stage.until_engine_waits()
        stage.compute("layer", 0.1)
    with stage.gate.training():
        stage.compute("layer", 0.1)
    assert stage.log == ["layer", "step", "layer"]


def test_a_backward_thread_may_give_way_for_the_trainer(stage: Stage) -> None:
    """On CUDA, autograd calls hooks on its own thread while the trainer waits for it."""

    def engine() -> None:
        with stage.engine_step():
            stage.compute("step", 0.1)
        stage.gate.engine_idle()

    with stage.gate.training():
        stage.start(engine)
        stage.until_engine_waits()
        stage.compute("layer", 0.1)
        stage.start(stage.gate.give_way).join(TIMEOUT)
        stage.compute("layer", 0.1)
    assert stage.log == ["layer", "step", "layer"]


def test_exceptions_release_the_gate(stage: Stage) -> None:
    with pytest.raises(KeyError), stage.gate.training():
        raise KeyError
    with pytest.raises(KeyError), stage.engine_step():
        raise KeyError
    stage.gate.engine_idle()
    with stage.gate.training():
        pass
    with stage.engine_step():
        pass


def test_a_failing_device_releases_the_gate() -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    gate = SliceGate(GOAL, synchronize=broken)
    with pytest.raises(RuntimeError, match="device lost"), gate.training():
        pass
    with engine_step(gate):
        pass


def test_misuse_is_refused(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="outside"):
        stage.gate.give_way()
    with stage.gate.training(), pytest.raises(RuntimeError, match="twice"), stage.gate.training():
        pass
    with stage.engine_step(), pytest.raises(RuntimeError, match="two engine steps"), stage.engine_step():
        pass
    for goal, share in ((0.0, 0.1), (1.0, 0.0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="minimal_share"):
            SliceGate(goal, minimal_share=share)


def test_the_device_is_waited_for_while_the_engine_is_busy() -> None:
    waits: list[int] = []
    gate = SliceGate(GOAL, synchronize=lambda: waits.append(1))
    with gate.training():
        gate.give_way()
    assert len(waits) == 1, "an idle engine needs no synchronisation between layers"
    with engine_step(gate):
        pass
    with gate.training():
        gate.give_way()
    assert len(waits) == 3


def test_both_sides_finish_under_real_contention() -> None:
    """Many short turns of both threads on the real clock: nobody is forgotten and they never overlap."""
    stage = Stage()
    gate = SliceGate(0.0005)

    def engine() -> None:
        for _ in range(500):
            with engine_step(gate):
                stage.compute("step", 0.0)
        gate.engine_idle()

    def trainer() -> None:
        for _ in range(50):
            with gate.training():
                for _ in range(20):
                    stage.compute("layer", 0.0)
                    gate.give_way()

    stage.start(engine)
    stage.start(trainer)
    stage.finish()
    assert stage.log.count("step") == 500
    assert stage.log.count("layer") == 1000
