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
        self.beside: list[str] = []
        """Ids of jobs that may run beside others."""
        self.slow = threading.Event()
        self.slow.set()

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

    def claim_beside(self, kinds: frozenset[str]) -> Any:
        assert self.slow.wait(20)
        return SimpleNamespace(id=self.beside.pop(0), attempt=1) if self.beside and "sft" in kinds else None

    def asked(self, claimed: Any) -> str:
        self.beats += 1
        return "OK"

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


SFT = frozenset({"sft"})


def test_jobs_are_claimed_beside_the_first_as_long_as_there_are_any() -> None:
    world = World()
    world.consumer.beside = ["job-2", "job-3"]

    def work() -> None:
        assert world.woken.wait(20)
        first = world.claims.take()
        assert first is not None
        found = [world.claims.take_beside(SFT, 20) for _ in range(3)]
        assert [one and one[0].id for one in found] == ["job-2", "job-3", None]
        assert not world.is_silent()
        for one in (first, found[0]):
            assert one is not None
            one[1].close()
        assert not world.is_silent(), "the third is kept alive"

    world.trainer(work)
    world.claims._thread.join(20)
    assert world.is_silent(), "and with the trainer it dies"


def test_a_queue_that_does_not_answer_holds_nothing_up_and_loses_nothing() -> None:
    world = World()
    world.consumer.beside = ["job-2"]

    def work() -> None:
        assert world.woken.wait(20)
        assert world.claims.take() is not None
        world.woken.clear()
        world.consumer.slow.clear()
        assert world.claims.take_beside(SFT, BEAT) is None
        began = time.monotonic()
        assert world.claims.take_beside(SFT, 20) is None, "the look before is still under way"
        assert time.monotonic() - began < 10
        world.claims.want()  # the first has ended meanwhile
        world.consumer.slow.set()
        assert world.woken.wait(20)
        found = world.claims.take()
        assert found is not None
        assert found[0].id == "job-2"

    world.trainer(work)
