"""Engines whose calls and streams end with every status that gRPC has: none of them is a fault of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import grpc
import httpx
import pytest

from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import FakeEngine, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.fixture(scope="module")
def failing() -> Iterator[Running]:
    running = Running([FakeEngine(behaviour=says("an answer", pause=0.01))], engine_retry_seconds=PATIENCE)
    running.start()
    running.wait_for(lambda: running.inference.engines.ready)
    yield running
    running.stop()


def opens(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/train/sessions", json={"adapter": "bot"})


CALLS: Mapping[str, Callable[[httpx.Client], httpx.Response]] = {
    "sessions": lambda http: http.get("/v1/sessions"),
    "session": lambda http: http.get("/v1/sessions/talk"),
    "save": lambda http: http.post("/v1/sessions/talk/save"),
    "export": lambda http: http.get("/v1/sessions/talk/export"),
    "delete": lambda http: http.delete("/v1/sessions/talk"),
    "open": opens,
    "training-sessions": lambda http: http.get("/v1/train/sessions"),
    "requests": lambda http: http.get("/v1/requests"),
    "logs": lambda http: http.get("/v1/logs"),
    "sleep": lambda http: http.post("/v1/engine/sleep"),
    "wake": lambda http: http.post("/v1/engine/wake"),
    "engines": lambda http: http.get("/v1/engine"),
    "metrics": lambda http: http.get("/metrics"),
}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_no_status_of_a_call_is_a_fault_of_the_gateway(code: grpc.StatusCode, failing: Running) -> None:
    failing.engine.histories.keep("", "talk", b"12345", used=100.9)
    with httpx.Client(base_url=failing.url, timeout=PATIENCE) as http:
        failing.engine.fails_calls = code
        try:
            answers = {name: call(http) for name, call in CALLS.items()}
        finally:
            failing.engine.fails_calls = None
    assert {name: answer.text for name, answer in answers.items() if answer.status_code == 500} == {}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_a_stream_may_end_with_any_status(code: grpc.StatusCode, failing: Running) -> None:
    """Who has a part of the answer hears that it is cut, and who asks then is answered."""
    failing.engine.breaks_with = code
    failing.engine.behaviour = says("x" * 1000, pause=0.01)
    with httpx.Client(base_url=failing.url, timeout=PATIENCE) as http:
        with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if '"content":"x' in line)
            failing.engine.behaviour = says("whole")
            failing.engine.break_streams()
            rest = list(lines)
        assert '"code":"unavailable"' in "".join(rest), rest
        whole = http.post("/v1/chat/completions", json=CHAT)
    assert (whole.status_code, whole.json()["choices"][0]["message"]["content"]) == (200, "whole")
