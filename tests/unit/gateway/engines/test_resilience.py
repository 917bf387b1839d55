"""Clients that leave, engines that die, gateways that are full."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from services.common.pb import engine_pb2
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, dies, fails, hangs, says

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/chat/completions"


def test_streaming_client_leaves(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("x" * 400, pause=0.02)
    with http.stream("POST", ROUTE, json=CHAT | {"stream": True}) as answer:
        next(answer.iter_lines())
    running.wait_for(lambda: bool(running.engine.aborts))
    assert running.engine.aborts == [(running.engine.requests[0].request_id, 0)]


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_client_leaves(running: Running, stream: bool) -> None:
    running.engine.behaviour = hangs
    running.leave(ROUTE, CHAT | {"stream": stream, "n": 3}, lambda: len(running.engine.running) == 3)
    running.wait_for(lambda: len(running.engine.aborts) == 3)


def test_many_clients_leave(running: Running) -> None:
    running.engine.behaviour = says("x" * 300, pause=0.01)

    def leave(number: int) -> None:
        with (
            contextlib.suppress(httpx.TimeoutException),
            httpx.Client(base_url=running.url, timeout=0.05 + number % 7 * 0.05) as http,
            http.stream("POST", ROUTE, json=CHAT | {"stream": number % 2 == 0}) as answer,
        ):
            for count, _ in enumerate(answer.iter_lines()):
                if count > number % 5:
                    break

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(48)))
    running.wait_for(lambda: not running.engine.running and running.inference.admission.in_flight == 0)


def test_admission_is_bounded(start: Starter) -> None:
    running = start(FakeEngine(behaviour=hangs), max_in_flight=4)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        with running.send(ROUTE, CHAT | {"n": 3}):
            running.wait_for(lambda: running.inference.admission.in_flight == 3)
            answer = http.post(ROUTE, json=CHAT | {"n": 2})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
        running.wait_for(lambda: running.inference.admission.in_flight == 0)


def test_engine_full(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "64 requests wait already")
    for stream in (False, True):
        answer = http.post(ROUTE, json=CHAT | {"stream": stream})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


def test_engine_error_in_a_stream(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "broken", after="ab")
    events = http.post(ROUTE, json=CHAT | {"stream": True}).text.split("\n\n")
    assert "error" in json.loads(events[-2].removeprefix("data: "))
    assert "[DONE]" not in "".join(events)
    assert http.post(ROUTE, json=CHAT).status_code == 500


def test_deadline(start: Starter) -> None:
    running = start(FakeEngine(behaviour=hangs), request_timeout_seconds=0.01)
    assert httpx.post(running.url + ROUTE, json=CHAT, timeout=10).status_code == 504


def test_engine_dies_while_it_answers(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = dies(after="ab")
    events = http.post(ROUTE, json=CHAT | {"stream": True}).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert "[DONE]" not in "".join(events)
    running.wait_for(lambda: running.inference.engines.ready)
    answer = http.post(ROUTE, json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


def _first(then: Behaviour, first: Behaviour) -> Behaviour:
    """Another behaviour for the first request."""
    seen: list[int] = []

    async def behave(engine, request, send) -> None:
        seen.append(1)
        await (first if len(seen) == 1 else then)(engine, request, send)

    return behave


def test_unstarted_request_waits_for_the_engine_to_come_back(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = _first(says("again"), dies())
    answer = http.post(ROUTE, json=CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == "again"
    assert len(running.engine.requests) == 2


def test_unstarted_request_goes_to_another_engine(start: Starter) -> None:
    left, right = FakeEngine(behaviour=dies()), FakeEngine(behaviour=dies())
    running = start(left, right)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        for engine, other in ((left, right), (right, left)):
            engine.behaviour, other.behaviour = dies(), says("here")
            answer = http.post(ROUTE, json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == "here"
            running.wait_for(lambda: all(client.ready for client in running.inference.engines.clients))
    assert len(left.requests) + len(right.requests) >= 3


def test_draining_engine_gets_nothing_new(start: Starter) -> None:
    left, right = FakeEngine(), FakeEngine()
    running = start(left, right)
    left.draining = True
    running.wait_for(lambda: sum(client.ready for client in running.inference.engines.clients) == 1)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        for number in range(8):
            body = CHAT | {"messages": [{"role": "user", "content": f"{number}"}]}
            assert http.post(ROUTE, json=body).status_code == 200
    assert not left.requests
    assert len(right.requests) == 8


def test_affinity(start: Starter) -> None:
    left, right = FakeEngine(), FakeEngine()
    running = start(left, right)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        for number in range(12):
            for _ in range(3):
                http.post(ROUTE, json=CHAT | {"adapter": f"bot-{number}"})
    for engine in (left, right):
        names = [request.adapter.named.name for request in engine.requests]
        assert names, "both engines are used"
        assert all(names.count(name) == 3 for name in names), "an adapter stays with its engine"


def test_no_engine(start: Starter) -> None:
    running = start(engine_retry_seconds=0.3)
    running.run(running.engine.stop())
    running.wait_for(lambda: not running.inference.engines.ready)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        begun = time.monotonic()
        answer = http.post(ROUTE, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in answer.headers
        assert time.monotonic() - begun < 60
        assert http.get("/readyz").status_code == 503
        assert http.get("/livez").status_code == 200
        assert http.get("/healthz").json()["status"] == "degraded"
        running.run(running.engine.start(running.engine.port))
        running.wait_for(lambda: running.inference.engines.ready)
        assert http.get("/readyz").status_code == 200
        assert http.post(ROUTE, json=CHAT).status_code == 200


def test_engine_with_another_checkpoint_is_kept_out(start: Starter) -> None:
    running = start(FakeEngine(), FakeEngine(digest="e" * 64), all_ready=False)
    clients = running.inference.engines.clients
    running.wait_for(lambda: any("another checkpoint" in client.last_error for client in clients))
    assert [client.ready for client in clients].count(True) == 1


def test_metrics(running: Running, http: httpx.Client) -> None:
    http.post(ROUTE, json=CHAT)
    text = http.get("/metrics").text
    assert 'temper_gateway_requests_total{method="POST",route="/v1/chat/completions",status="200"}' in text
    for name in ("time_to_first_token", "inter_token_latency", "completion_duration"):
        assert f"temper_gateway_{name}_seconds_count" in text
    assert 'temper_gateway_tokens_total{kind="completion"}' in text
    assert 'temper_gateway_engines{state="ready"} 1.0' in text
    assert "temper_gateway_ready 1.0" in text
    assert "temper_gateway_draining 0.0" in text
    assert 'temper_build_info{service="gateway",version="' in text


def test_queues_are_in_the_metrics_while_redis_answers(start: Starter) -> None:
    running = start(FakeEngine())
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert 'temper_gateway_jobs{queue="training",state="queued"} 0.0' in http.get("/metrics").text
        running.queue.down = True
        running.health.queues._due = 0.0
        text = http.get("/metrics").text
    assert "temper_gateway_redis_up 0.0" in text
    assert "temper_gateway_jobs{" not in text


def test_keep_alive(start: Starter) -> None:
    async def slow(engine, request, send) -> None:
        await send(engine_pb2.Update(request_id=request.request_id, token_ids=[97]))
        await asyncio.sleep(0.4)
        await says("b")(engine, request, send)

    running = start(FakeEngine(behaviour=slow), keep_alive_seconds=0.1)
    answer = httpx.post(running.url + ROUTE, json=CHAT | {"stream": True}, timeout=10)
    assert ": keep-alive\n\n" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


CALLS = {
    ROUTE: CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
}
WAITING = "temper_gateway_waiting_for_engine"


def test_requests_wait_for_the_first_engine(start: Starter) -> None:
    """As long as a setting says, where engines are scaled to zero; the gauge is what starts one."""
    engine = FakeEngine()
    running = start(engine, engine_start_seconds=PATIENCE, engine_retry_seconds=0)
    port = engine.port
    running.run(engine.stop())
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http, ThreadPoolExecutor(len(CALLS)) as pool:
        running.wait_for(lambda: not running.inference.engines.ready)
        asked = [pool.submit(http.post, route, json=body) for route, body in CALLS.items()]
        running.wait_for(lambda: running.inference.engines.waiting == len(CALLS))
        assert f"{WAITING} {len(CALLS)}.0" in http.get("/metrics").text
        running.leave(ROUTE, CHAT, lambda: running.inference.engines.waiting == len(CALLS) + 1)
        running.wait_for(lambda: running.inference.engines.waiting == len(CALLS))
        running.run(engine.start(port))
        statuses = {route: one.result().status_code for route, one in zip(CALLS, asked, strict=True)}
        del statuses["/v1/embeddings"]  # this engine makes no vectors
        assert set(statuses.values()) == {200}
        assert sum(bool(one.pooling) for one in engine.requests) == 1, "but it was asked"
        assert f"{WAITING} 0.0" in http.get("/metrics").text


@pytest.mark.parametrize("header", [{}, {"x-request-timeout-seconds": "0.2"}], ids=["setting", "the client's time"])
def test_a_request_does_not_wait_for_ever_for_an_engine(header: dict[str, str], start: Starter) -> None:
    seconds = PATIENCE if header else 0.2
    running = start(FakeEngine(), engine_start_seconds=seconds, engine_retry_seconds=0)
    running.run(running.engine.stop())
    running.wait_for(lambda: not running.inference.engines.ready)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        answer = http.post(ROUTE, json=CHAT, headers=header)
    assert answer.status_code == (504 if header else 503)
    assert running.inference.engines.waiting == 0
