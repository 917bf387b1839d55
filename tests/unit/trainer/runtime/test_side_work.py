"""How a job's pauses are shared out."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from services.trainer.runtime.interleaving import NoSideWork, Pauses


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pieces:
    """Side work of pieces that take this long."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.left = list(seconds)
        self.swept = 0

    def bind(self, wake: Callable[[], None]) -> None:
        raise AssertionError("a job's pauses do not bind")

    @property
    def ready(self) -> bool:
        return bool(self.left)

    def run_next(self) -> bool:
        if not self.left:
            return False
        self.clock.now += self.left.pop(0)
        return True

    def sweep(self) -> None:
        self.swept += 1


def test_side_work_gets_as_much_time_as_the_job_had() -> None:
    clock = Clock()
    pieces = Pieces(clock, *[1.0] * 10)
    pause = Pauses(lambda: None, pieces, clock)
    clock.now += 3.0
    pause()
    assert len(pieces.left) == 7
    clock.now += 2.0
    pause()
    assert len(pieces.left) == 5


def test_at_least_one_piece_and_never_more_than_one_over_the_share() -> None:
    clock = Clock()
    pieces = Pieces(clock, 5.0, 5.0, 5.0)
    pause = Pauses(lambda: None, pieces, clock)
    clock.now += 0.01
    pause()
    assert len(pieces.left) == 2
    clock.now += 6.0
    pause()
    assert len(pieces.left) == 0


def test_time_without_side_work_is_not_saved_up() -> None:
    clock = Clock()
    pieces = Pieces(clock)
    pause = Pauses(lambda: None, pieces, clock)
    clock.now += 1000.0
    pause()
    assert pieces.swept == 1
    pieces.left = [1.0] * 5
    clock.now += 1.0
    pause()
    assert len(pieces.left) == 4


def test_a_job_that_must_stop_does_so_before_and_after() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    clock = Clock()
    pieces = Pieces(clock, 1.0)
    with pytest.raises(Stop):
        Pauses(stop, pieces, clock)()
    assert pieces.left == [1.0]
    stopping = threading.Event()

    def check() -> None:
        if stopping.is_set():
            raise Stop

    class Ends(Pieces):
        def run_next(self) -> bool:
            stopping.set()
            return super().run_next()

    with pytest.raises(Stop):
        Pauses(check, Ends(clock, 1.0, 1.0), clock)()


def test_nothing_beside() -> None:
    nothing = NoSideWork()
    nothing.bind(lambda: None)
    Pauses(lambda: None, nothing)()
    assert not nothing.run_next()
