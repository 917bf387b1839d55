"""Requests of the process itself: behind users' requests, in nobody's way, in no metric of latency."""

from __future__ import annotations

import pytest

from services.common.errors import Overloaded, Unavailable
from services.engine.requests.request import FinishReason
from tests.unit.engine.loop.loop_fixture import CONFIG, TIMEOUT, running

BEHIND = {"background": True, "priority": 2**31}


def test_background_requests_take_no_place_of_the_queue() -> None:
    with running(max_waiting=2) as engine:
        engine.runner.hold()
        engine.submit("r0")
        engine.runner.entered.get(timeout=TIMEOUT)
        for n in range(10):
            engine.submit(f"b{n}", **BEHIND)
        users = CONFIG.max_num_seqs + 2
        for n in range(1, users):
            engine.submit(f"r{n}")
        with pytest.raises(Overloaded, match="limit is 2"):
            engine.submit("too-many")
        engine.submit("b10", **BEHIND)
        engine.runner.go_on()
        engine.client.wait(*(f"r{n}" for n in range(users)), *(f"b{n}" for n in range(11)))
        engine.settle()
        assert engine.loop.status().background == 0
        assert {finished.request.request_id for finished in engine.observer.done} == {f"r{n}" for n in range(users)}
        engine.check_nothing_left()


def test_a_user_takes_the_seat_of_a_background_request() -> None:
    with running() as engine:
        engine.runner.hold()
        names = [f"b{n}" for n in range(CONFIG.max_num_seqs)]
        for name in names:
            engine.submit(name, max_tokens=30, **BEHIND)
        engine.runner.entered.get(timeout=TIMEOUT)
        engine.submit("user", max_tokens=3)
        engine.runner.go_on()
        order = []
        ended: set[str] = set()
        while len(ended) < len(names) + 1:
            for update in engine.client.frames.get(timeout=TIMEOUT):
                if update.finish_reason is not None:
                    assert update.finish_reason is FinishReason.LENGTH
                    ended.add(update.request_id)
                    order.append(update.request_id)
        assert order[0] == "user"
        assert engine.observer.steps[-1].counts.preemptions >= 1
        engine.check_nothing_left()


def test_a_draining_engine_refuses_background_requests() -> None:
    with running() as engine:
        assert engine.loop.drain(TIMEOUT)
        with pytest.raises(Unavailable):
            engine.submit("b", **BEHIND)
