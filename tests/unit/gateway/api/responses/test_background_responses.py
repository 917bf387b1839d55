"""Background responses: their life, their end, and what a stopping or silent gateway leaves behind."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from services.common.pb import engine_pb2
from services.gateway.protocol.responses.response import ResponseOut
from services.gateway.settings import GatewaySettings
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, fails, hangs, says

ROUTE = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "hi", "background": True}


def begin(http: httpx.Client, **change: Any) -> str:
    answer = http.post(ROUTE, json=ASK | change)
    assert answer.status_code == 200, answer.text
    ResponseOut.model_validate(answer.json())
    assert (answer.json()["status"], answer.json()["background"]) == ("queued", True)
    return str(answer.json()["id"])


def await_status(running: Running, http: httpx.Client, response_id: str, status: str) -> dict[str, Any]:
    running.wait_for(lambda: http.get(f"{ROUTE}/{response_id}").json()["status"] == status)
    body: dict[str, Any] = http.get(f"{ROUTE}/{response_id}").json()
    ResponseOut.model_validate(body)
    return body


def test_life(start: Starter) -> None:
    running = start(FakeEngine(behaviour=says("slowly", pause=0.05)), response_beat_seconds=0.02)
    running.engine.attached = "bot@2"
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        response_id = begin(http)
        assert await_status(running, http, response_id, "in_progress")["output"] == []
        done = await_status(running, http, response_id, "completed")
        assert done["output"][0]["content"][0]["text"] == "slowly"
        assert (done["adapter"], done["usage"]["output_tokens"]) == ("bot@2", 7)
        assert http.post(f"{ROUTE}/{response_id}/cancel").json() == done, "what has ended stays as it is"
        assert running.inference.admission.in_flight == running.response_services.background.running == 0
        answer = http.post(ROUTE, json={"model": MODEL, "input": "and?", "previous_response_id": response_id})
        assert answer.status_code == 200


def test_cancel(running: Running, client: openai.OpenAI, http: httpx.Client) -> None:
    running.engine.behaviour = hangs
    response_id = begin(http)
    running.wait_for(lambda: bool(running.engine.requests))
    unfinished = http.post(ROUTE, json={"model": MODEL, "input": "?", "previous_response_id": response_id})
    assert (unfinished.status_code, unfinished.json()["error"]["code"]) == (409, "conflict")
    cancelled = client.responses.cancel(response_id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    running.wait_for(lambda: bool(running.engine.aborts))
    running.wait_for(lambda: running.response_services.background.running == 0)
    assert client.responses.cancel(response_id).status == "cancelled"
    running.engine.behaviour = says("hi")
    foreground = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(foreground.id)
    assert "background" in refused.value.message


def test_deleted_or_cancelled_elsewhere(start: Starter) -> None:
    running = start(FakeEngine(behaviour=hangs), response_beat_seconds=0.02)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        response_id = begin(http)
        running.wait_for(lambda: bool(running.engine.requests))
        assert http.delete(f"{ROUTE}/{response_id}").json() == {
            "id": response_id,
            "object": "response",
            "deleted": True,
        }
        running.wait_for(lambda: len(running.engine.aborts) == 1)
        other = begin(http)
        running.wait_for(lambda: len(running.engine.requests) == 2)
        (key,) = running.responses.records
        assert key.endswith(other)
        del running.responses.records[key]  # by another gateway
        running.wait_for(lambda: len(running.engine.aborts) == 2)
        running.wait_for(lambda: running.response_services.background.running == 0)
        assert running.responses.records == {}, "nothing is written about what nobody wants"


def test_fails(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_OVERLOADED, "64 requests wait already")
    full = await_status(running, http, begin(http), "failed")
    assert full["error"] == {"code": "rate_limit_exceeded", "message": "64 requests wait already"}
    running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INTERNAL, "secret", after="ab")
    broken = await_status(running, http, begin(http), "failed")
    assert broken["error"] == {"code": "server_error", "message": "internal error; the log has the details"}
    assert broken["output"][0]["content"][0]["text"] == "ab"


def test_what_cannot_succeed_is_refused_at_once(running: Running, http: httpx.Client) -> None:
    for change, status in (({"input": "x" * 600}, 400), ({"model": "no model!"}, 404), ({"store": False}, 400)):
        assert http.post(ROUTE, json=ASK | change).status_code == status
    streamed = http.post(ROUTE, json=ASK | {"stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    assert (running.responses.records, running.response_services.background.running) == ({}, 0)


def test_number_is_bounded(start: Starter) -> None:
    running = start(FakeEngine(behaviour=hangs), max_background_responses=2, shutdown_grace_seconds=0)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        first, _ = begin(http), begin(http)
        full = http.post(ROUTE, json=ASK)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in full.headers
        assert running.inference.admission.in_flight == 2, "what was refused holds nothing"
        http.post(f"{ROUTE}/{first}/cancel")
        running.wait_for(lambda: running.response_services.background.running == 1)
        begin(http)


def test_lease_outlives_beats() -> None:
    with pytest.raises(ValidationError, match="three times TEMPER_RESPONSE_BEAT_SECONDS"):
        GatewaySettings(response_beat_seconds=11)
    assert GatewaySettings(response_beat_seconds=11, response_lease_seconds=33).response_lease_seconds == 33


def test_turned_off(start: Starter) -> None:
    running = start(max_background_responses=0)
    answer = httpx.post(running.url + ROUTE, json=ASK, timeout=10)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


def test_gateway_stops(start: Starter) -> None:
    async def never(engine: Any, request: Any, send: Any) -> None:
        await send(engine_pb2.Update(request_id=request.request_id, token_ids=[97]))
        await asyncio.Event().wait()

    async def behave(engine: Any, request: Any, send: Any) -> None:
        chosen = says("late", pause=0.1) if request.sampling.max_tokens == 9 else never
        await chosen(engine, request, send)

    running = start(FakeEngine(behaviour=behave), shutdown_grace_seconds=1, response_beat_seconds=0.02)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        late, stuck = begin(http, max_output_tokens=9), begin(http)
        await_status(running, http, stuck, "in_progress")
        running.run(_set(running.lifecycle.closing))
        refused = http.post(ROUTE, json=ASK)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    running.stop()
    stored = {key.rpartition(":")[2]: running.responses.status(key) for key in running.responses.records}
    assert stored == {late: "completed", stuck: "failed"}
    response = json.loads(next(text for key, text in running.responses.records.items() if key.endswith(stuck)))[0]
    assert "stopped" in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "a"


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_redis_away_at_the_end(start: Starter) -> None:
    released = threading.Event()

    async def waits(engine: Any, request: Any, send: Any) -> None:
        await asyncio.to_thread(released.wait, 20)
        await says("done")(engine, request, send)

    running = start(FakeEngine(behaviour=waits), response_beat_seconds=0.02)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        response_id = begin(http)
        running.responses.down = True
        released.set()
        running.wait_for(lambda: running.inference.admission.in_flight == 0)
        assert running.response_services.background.running == 1, "its answer is not stored yet"
        running.responses.down = False
        await_status(running, http, response_id, "completed")
