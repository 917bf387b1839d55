"""Training sessions over HTTP: which engine is asked, what futures look like, what is said when an engine is gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.fake_sessions import FakeSessions, refused

DATA = [{"token_ids": [5, 6, 7]}]


def opened(http: httpx.Client, **fields: Any) -> str:
    answer = http.post("/v1/train/sessions", json=fields)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def send(http: httpx.Client, session: str, call: str = "forward", seq: int = 1, **fields: Any) -> dict[str, Any]:
    body = {"seq": seq, **({"data": DATA} if call == "forward" else {}), **fields}
    answer = http.post(f"/v1/train/sessions/{session}/{call}", json=body)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def test_the_life_of_a_session(running: Running, http: httpx.Client) -> None:
    session = opened(http, lora={"rank": 4}, ttl_seconds=60, metadata={"who": "me"})
    request = running.engine.sessions.opened[session]
    assert (request.lora.rank, request.ttl_seconds, request.metadata) == (4, 60, {"who": "me"})
    assert request.lora.model_fields_set == {"rank"}, "what was given is told from what is a default"
    assert http.get(f"/v1/train/sessions/{session}").json()["id"] == session
    assert [one["id"] for one in http.get("/v1/train/sessions").json()["data"]] == [session]
    assert http.delete(f"/v1/train/sessions/{session}").json() == {
        "id": session,
        "object": "train.session",
        "deleted": True,
    }
    assert error_of(http.get(f"/v1/train/sessions/{session}"), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("forward_backward", {"loss": "cross_entropy", "data": DATA}),
        ("forward", {"data": DATA}),
        ("optim_step", {}),
        ("optim_step", {"learning_rate": 0}),
        ("sample", {"prompts": ["a", [5]], "max_tokens": 4}),
        ("save", {"name": "mine"}),
        ("load", {"checkpoint": "mine"}),
    ],
)
def test_every_call_is_a_future(running: Running, http: httpx.Client, call: str, fields: dict[str, Any]) -> None:
    session = opened(http)
    sent = send(http, session, call, 3, **fields)
    assert sent == {
        "id": sent["id"],
        "object": "train.future",
        "session": session,
        "seq": 3,
        "operation": call,
        "state": "done",
        "result": {"echo": call},
    }
    assert http.get(f"/v1/train/futures/{sent['id']}").json() == sent


def test_a_pending_future_is_waited_for(running: Running, http: httpx.Client) -> None:
    running.engine.sessions.holds = True
    running.run(_cleared(running.engine.sessions))
    session = opened(http)
    sent = send(http, session)
    assert (sent["state"], sent["queue"]) == ("pending", {"state": "waiting", "ahead": 2})
    url = f"/v1/train/futures/{sent['id']}"
    began = time.monotonic()
    assert http.get(url, params={"wait": 0.5}).json()["state"] == "pending"
    assert 0.4 < time.monotonic() - began < 30
    ending = threading.Timer(0.3, lambda: running.run(_finished(running.engine.sessions)))
    ending.start()
    began = time.monotonic()
    assert http.get(url, params={"wait": 60}).json()["result"] == {"echo": "forward"}
    assert time.monotonic() - began < 30
    assert error_of(http.get(url, params={"wait": 61}), 400)["param"] == "wait"


@pytest.mark.parametrize(
    ("code", "category", "name"),
    [
        (engine_pb2.ERROR_CODE_INVALID_REQUEST, "user", "invalid_request"),
        (engine_pb2.ERROR_CODE_DOES_NOT_FIT, "user", "does_not_fit"),
        (engine_pb2.ERROR_CODE_NOT_FOUND, "user", "not_found"),
        (engine_pb2.ERROR_CODE_MODEL_NOT_FOUND, "user", "model_not_found"),
        (engine_pb2.ERROR_CODE_CONFLICT, "user", "conflict"),
        (engine_pb2.ERROR_CODE_DEADLINE_EXCEEDED, "server", "deadline_exceeded"),
        (engine_pb2.ERROR_CODE_GONE, "server", "gone"),
        (engine_pb2.ERROR_CODE_OVERLOADED, "server", "overloaded"),
        (engine_pb2.ERROR_CODE_UNAVAILABLE, "server", "unavailable"),
        (engine_pb2.ERROR_CODE_INTERNAL, "server", "internal_error"),
    ],
)
def test_a_failed_future_says_whose_fault_it_is(
    running: Running, http: httpx.Client, code: engine_pb2.ErrorCode, category: str, name: str
) -> None:
    running.engine.sessions.holds = True
    sent = send(http, opened(http))
    running.run(_finished(running.engine.sessions, refused(code, "because", "data")))
    found = http.get(f"/v1/train/futures/{sent['id']}").json()
    assert found["state"] == "failed"
    assert {key: found["error"][key] for key in ("message", "code", "category")} == {
        "message": "because",
        "code": name,
        "category": category,
    }


def test_a_new_session_goes_where_the_fewest_are_and_on_to_where_there_is_room(start: Starter) -> None:
    full, free = FakeEngine(), FakeEngine()
    running = start(full, free)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        names = []
        for count in range(1, 5):
            names.append(opened(http))
            running.wait_for(
                lambda count=count: sum(c.status.sessions_open for c in running.inference.engines.clients) == count  # type: ignore[misc]
            )
        assert len(full.sessions.opened) == len(free.sessions.opened) == 2
        for name in names:
            assert http.get(f"/v1/train/sessions/{name}").status_code == 200, "found wherever it is"
        assert len(http.get("/v1/train/sessions").json()["data"]) == 4
        full.sessions.refuses = refused(engine_pb2.ERROR_CODE_OVERLOADED, "full")
        for _ in range(3):
            assert opened(http) in free.sessions.opened
        free.sessions.refuses = refused(engine_pb2.ERROR_CODE_DOES_NOT_FIT, "needs 3 MiB", "lora.rank")
        answer = http.post("/v1/train/sessions", json={})
        assert answer.json()["error"]["message"] in ("full", "needs 3 MiB"), "what the last one said"
        assert answer.status_code in (400, 503)
        full.sessions.refuses = refused(engine_pb2.ERROR_CODE_INVALID_REQUEST, "bad", "lora")
        assert error_of(http.post("/v1/train/sessions", json={}), 400)["message"] == "bad"


def test_an_engine_that_is_back_with_another_process_has_lost_its_sessions(start: Starter) -> None:
    engine = FakeEngine()
    running = start(engine, engine_retry_seconds=60)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        session = opened(http)
        sent = send(http, session)
        running.run(engine.stop())
        running.wait_for(lambda: not running.inference.engines.clients[0].connected)
        away = http.get(f"/v1/train/sessions/{session}")
        assert error_of(away, 503)["code"] == "unavailable"
        assert "retry-after" in away.headers
        assert http.get(f"/v1/train/futures/{sent['id']}").status_code == 503
        engine.sessions = FakeSessions("0" * 12)
        running.run(engine.start(engine.port))
        running.wait_for(lambda: running.inference.engines.clients[0].connected)
        assert "has ended" in error_of(http.get(f"/v1/train/sessions/{session}"), 410)["message"]
        assert error_of(http.post(f"/v1/train/sessions/{session}/optim_step", json={"seq": 2}), 410)["code"] == "gone"
        assert error_of(http.delete(f"/v1/train/sessions/{session}"), 410)["code"] == "gone"
        failed = http.get(f"/v1/train/futures/{sent['id']}", params={"wait": 5})
        assert failed.status_code == 200
        assert (failed.json()["state"], failed.json()["error"]["category"]) == ("failed", "server")


def test_an_engine_that_was_only_out_of_reach_still_has_its_sessions(start: Starter) -> None:
    engine = FakeEngine()
    running = start(engine, engine_retry_seconds=60)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        session = opened(http)
        sent = send(http, session)
        running.run(engine.stop())
        running.wait_for(lambda: not running.inference.engines.clients[0].connected)
        returning = threading.Timer(1.0, lambda: running.run(engine.start(engine.port)))
        returning.start()
        found = http.get(f"/v1/train/futures/{sent['id']}", params={"wait": 15})
        assert (found.status_code, found.json()["state"]) == (200, "done"), "the wait outlasts the outage"
        running.wait_for(lambda: running.inference.engines.clients[0].connected)
        assert http.get(f"/v1/train/sessions/{session}").status_code == 200


def test_an_engine_that_stays_away_counts_as_gone(start: Starter) -> None:
    engine = FakeEngine()
    running = start(engine, engine_retry_seconds=0.5)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        session = opened(http)
        running.run(engine.stop())
        deadline = time.monotonic() + 20
        while (answer := http.get(f"/v1/train/sessions/{session}")).status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "out of reach for 0.5 s" in error_of(answer, 410)["message"]


def test_an_engine_without_trainer_is_not_asked(start: Starter) -> None:
    engine = FakeEngine()
    engine.sessions.instance = ""
    running = start(engine)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert "TEMPER_TRAINER" in error_of(http.post("/v1/train/sessions", json={}), 503)["message"]


def test_what_the_engine_would_refuse_is_refused_here(running: Running, http: httpx.Client) -> None:
    session = opened(http)
    url = f"/v1/train/sessions/{session}/forward"
    for data, param in (
        ([{"token_ids": [5] * 257}], "data[0].token_ids"),
        ([{"token_ids": [5, 6]}, {"token_ids": [5, 10**6]}], "data[1].token_ids"),
        ([{"token_ids": [5, 6], "advantages": [0, 1]}], "data[0].advantages"),
        ([{"token_ids": [5, 6], "weights": [0]}], "data[0].weights"),
    ):
        assert error_of(http.post(url, json={"seq": 1, "data": data}), 400)["param"] == param
    assert running.engine.sessions.futures == {}


def test_names_that_are_no_ids(http: httpx.Client) -> None:
    for name in ("x", "ts-zz-zz", "ts-0123456789ab-0123456789abc", "%2e%2e"):
        assert http.get(f"/v1/train/sessions/{name}").status_code == 404
        assert http.get(f"/v1/train/futures/{name}").status_code == 404


async def _finished(sessions: FakeSessions, error: engine_pb2.Error | None = None) -> None:
    sessions.finish(error)


async def _cleared(sessions: FakeSessions) -> None:
    sessions.changed.clear()
