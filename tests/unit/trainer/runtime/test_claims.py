"""Jobs are claimed and kept alive for a trainer's thread that lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.trainer.runtime.claims import JobClaims
from services.trainer.runtime.job_link import JobSession

BEAT = 0.02


class Consumer:
    """Has one job; counts what it is told."""

    def __init__(self) -> None:
        self.claims = self.beats = 0
        self.broken = 0

    def forget_dead_consumers(self) -> None:
        """There are none."""

    def claim(self, seconds: float) -> Any:
        self.claims += 1
        if self.broken:
            self.broken -= 1
            raise KeyError("a bug")
        if self.claims == 1:
            return SimpleNamespace(id="job-1", attempt=1)
        time.sleep(min(seconds, BEAT))
        return None

    def heartbeat(self, claimed: Any) -> bool:
        self.beats += 1
        return False

    def adopt_waiting(self) -> None:
        """There is nothing."""


class World:
    def __init__(self) -> None:
        self.consumer = Consumer()
        self.draining, self.woken = threading.Event(), threading.Event()
        self.claims = JobClaims(
            cast(Any, self.consumer),
            lambda claimed: JobSession(
                cast(Any, self.consumer), claimed, heartbeat_seconds=BEAT, draining=self.draining
            ),
            draining=self.draining,
            wake=self.woken.set,
        )

    def trainer(self, work: Callable[[], None]) -> None:
        """Runs a trainer's thread to its end."""

        def run() -> None:
            self.claims.start()
            work()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)

    def is_silent(self) -> bool:
        before = self.consumer.beats
        time.sleep(10 * BEAT)
        return self.consumer.beats == before


@pytest.mark.parametrize("taken", [False, True])
def test_a_trainer_that_died_has_no_claim(taken: bool) -> None:
    world = World()

    def work() -> None:
        assert world.woken.wait(20)
        assert not world.is_silent(), "kept alive while the trainer is busy with something else"
        if taken:
            assert world.claims.take() is not None

    world.trainer(work)
    world.claims._thread.join(20)
    assert not world.claims.alive
    assert world.is_silent()


def test_a_bug_ends_neither_the_thread_nor_a_claim() -> None:
    world = World()
    world.consumer.broken = 1
    over = threading.Event()
    thread = threading.Thread(target=world.trainer, args=(lambda: over.wait(20) and None,))
    thread.start()
    time.sleep(10 * BEAT)
    assert world.claims.alive
    world.draining.set()
    over.set()
    thread.join(20)


def test_a_drain_leaves_the_session_to_whoever_hands_the_job_back() -> None:
    world = World()

    def work() -> None:
        assert world.woken.wait(20)
        world.draining.set()
        world.claims.join()
        found = world.claims.take()
        assert found is not None
        assert not world.is_silent()
        found[1].close()
        found[1].close()

    world.trainer(work)
    assert world.is_silent()
