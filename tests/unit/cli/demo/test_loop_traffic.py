"""Traffic of the demo's loop: visitors ask and react until the block ends, and what fails is told."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from cli.demo.loop.traffic import Traffic, Visit, satisfaction
from cli.http.client import Client
from cli.output import CliError, ExitCode


class Gateway:
    """Stands for a client: answers everybody alike, and keeps what was sent."""

    def __init__(self, fails_after: int = 10**9) -> None:
        self.asked: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self._fails_after = fails_after
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if path == "/v1/feedback":
                self.said.append(body)
                return {}
            self.asked.append(body)
            if len(self.asked) > self._fails_after:
                raise CliError("it is away", ExitCode.UNREACHABLE)
            return {"id": f"chatcmpl-{len(self.asked)}", "choices": [{"message": {"content": "no"}}], "adapter": "v@1"}


def traffic(gateway: Gateway) -> Traffic:
    return Traffic(cast(Client, gateway), "qwen3.5", seed=1)


def test_visitors_come_and_say_what_they_think() -> None:
    gateway = Gateway()
    flow = traffic(gateway)
    with flow.flowing(), flow.hurrying():
        seen = flow.wait(40)
    assert len(seen) == 40
    assert {(visit.version, visit.rating) for visit in seen} == {("v@1", -1.0)}
    assert len({body["user"] for body in gateway.asked}) == len(gateway.asked)
    assert all(said["score"] == -1 and said["completion_id"].startswith("chatcmpl-") for said in gateway.said)
    assert len(gateway.said) == len(gateway.asked) == len(flow.visits)
    assert 0 < sum("correction" in said for said in gateway.said) < len(gateway.said)


def test_trolls_come_while_they_do() -> None:
    flow = traffic(Gateway())
    with flow.flowing(), flow.hurrying():
        with flow.trolling():
            assert all(visit.troll for visit in flow.wait(20, lambda visit: visit.troll))
        assert not any(visit.troll for visit in flow.wait(20))


def test_a_request_that_fails_ends_it() -> None:
    flow = traffic(Gateway(fails_after=5))
    with pytest.raises(CliError, match="a visitor got no answer: it is away") as raised, flow.flowing():
        flow.wait(1000)
    assert raised.value.code is ExitCode.UNREACHABLE


def test_satisfaction_is_the_mean_rating() -> None:
    assert satisfaction([Visit(0.0, "base", 1.0), Visit(1.0, "base", -1.0), Visit(2.0, "base", 1.0)]) == pytest.approx(
        1 / 3
    )
