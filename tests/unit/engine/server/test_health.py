"""Health of an engine process, as probes read it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from services.engine.server.health import LIVENESS, READINESS, STARTUP, ProcessHealth, Vitals

SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Loop:
    alive: bool = True
    accepting: bool = True
    stuck: float = 0.0

    @property
    def vitals(self) -> Vitals:
        return Vitals(lambda: self.alive, lambda: self.accepting, lambda: self.stuck)


def said(health: ProcessHealth) -> tuple[bool, bool, bool]:
    """Liveness, readiness, startup; every name of one says the same."""
    found = health.statuses()
    answers = [{found[name] for name in names} for names in (LIVENESS, READINESS, STARTUP)]
    assert all(len(answer) == 1 for answer in answers)
    return answers[0] == {SERVING}, answers[1] == {SERVING}, answers[2] == {SERVING}


def test_the_course_of_a_process() -> None:
    loop, health = Loop(), ProcessHealth(watchdog_seconds=5)
    assert said(health) == (True, False, False), "loading"
    health.serving(loop.vitals)
    assert said(health) == (True, True, True)
    loop.accepting = False
    assert said(health) == (True, False, True), "its steps fail, or it is told to take nothing"
    loop.accepting = True
    health.drain()
    assert said(health) == (True, False, True)
    loop.alive = False
    assert said(health) == (True, False, True), "a loop that ended in a drain is no reason to kill the process"


def test_a_loop_that_died_is_a_reason_to_restart() -> None:
    loop, health = Loop(), ProcessHealth()
    health.serving(loop.vitals)
    loop.alive = False
    assert said(health) == (False, False, True)


def test_what_works_beside_the_loop_is_part_of_its_life() -> None:
    """A trainer whose thread has died keeps no job, but would keep its claim."""

    class Started:
        alive = healthy = True
        stuck_seconds = 0.0

        def status(self) -> Any:
            return SimpleNamespace(accepting=True)

    beside, health = [True, True], ProcessHealth()
    health.serving(Vitals.of(cast(Any, Started()), lambda: beside[0], lambda: beside[1]))
    assert said(health) == (True, True, True)
    for index in range(2):
        beside[index] = False
        assert said(health) == (False, False, True)
        beside[index] = True
    beside[0] = False
    health.drain()
    assert said(health) == (True, False, True), "it ends with what it has to do"


def test_a_step_that_hangs() -> None:
    loop, health = Loop(stuck=100.0), ProcessHealth(watchdog_seconds=60)
    assert said(health) == (True, False, False), "compiling and capturing at the start may take as long as they take"
    loop.stuck = 0.0
    health.serving(loop.vitals)
    loop.stuck = 59.0
    assert said(health) == (True, True, True)
    loop.stuck = 61.0
    with capture_logs() as logs:
        assert said(health) == (False, False, True)
        assert said(health) == (False, False, True)
    assert [line["log_level"] for line in logs] == ["critical"], "once"
    assert logs[0]["limit"] == "TEMPER_WATCHDOG_SECONDS=60"
    loop.stuck = 0.0
    assert said(health) == (True, True, True)


def test_an_event_loop_that_hangs() -> None:
    loop, health = Loop(), ProcessHealth(watchdog_seconds=60)
    health.serving(loop.vitals)
    assert said(health)[0]
    health._beat -= 61
    assert said(health) == (False, False, True)
    health.beat()
    assert said(health) == (True, True, True)


def test_without_a_watchdog_nothing_hangs() -> None:
    loop, health = Loop(), ProcessHealth(watchdog_seconds=0)
    health.serving(loop.vitals)
    loop.stuck = 1e9
    assert said(health) == (True, True, True)
