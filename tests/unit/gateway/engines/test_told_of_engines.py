"""Engines as clients and operators are told of them: in usage, /healthz and /metrics."""

from __future__ import annotations

import httpx

from services.common.pb import engine_pb2
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, fails

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/chat/completions"


def test_sessions_in_requests(running: Running, http: httpx.Client) -> None:
    (client,) = running.inference.engines.clients
    expected = {"id": "mine", "engine": client.id}
    assert str(running.engine.port) not in client.id
    for sent, headers in (({"session_id": "mine"}, {}), ({}, {"x-session-id": "mine"})):
        usage = http.post(ROUTE, json=CHAT | sent, headers=headers).json()["usage"]
        assert usage["session"] == expected
        body = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
        events = http.post("/v1/completions", json=body | sent, headers=headers).text.split("\n\n")
        assert f'"session":{{"id":"mine","engine":"{client.id}"}}' in events[-3]
    assert "session" not in http.post(ROUTE, json=CHAT | {"prompt_cache_key": "k"}).json()["usage"]
    both = http.post(ROUTE, json=CHAT | {"session_id": "mine"}, headers={"x-session-id": "other"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "session_id")
    for sent, headers in (({"session_id": ""}, {}), ({"session_id": "x" * 257}, {}), ({}, {"x-session-id": "x" * 257})):
        refused = http.post(ROUTE, json=CHAT | sent, headers=headers)
        assert refused.status_code == 400
        assert "session" in refused.json()["error"]["param"]


def test_engines_are_described(start: Starter) -> None:
    engine = FakeEngine(behaviour=fails(engine_pb2.ERROR_CODE_INTERNAL, "a kernel failed"))
    running = start(engine, breaker_failures=1, breaker_open_seconds=60)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert http.post(ROUTE, json=CHAT).status_code == 500
        name = f"127.0.0.1:{engine.port}"
        text = http.get("/metrics").text
        assert f'temper_gateway_engine_breaker{{engine="{name}"}} 2.0' in text
        assert f'temper_gateway_engine_load{{engine="{name}"}}' in text
        assert 'temper_gateway_routed_total{by="only"} 1.0' in text
        (described,) = http.get("/healthz").json()["engines"]
        assert (described["address"], described["breaker"], described["leaving"]) == (name, "open", False)


def test_metrics_call_engines_by_their_names(start: Starter) -> None:
    """An address is another after each restart; two that call themselves alike are told apart by it."""
    running = start(FakeEngine(name="r-engine-0"), FakeEngine(name="twin"), FakeEngine(name="twin"), FakeEngine())
    text = httpx.get(f"{running.url}/metrics", trust_env=False, timeout=PATIENCE).text
    found = {line.partition('engine="')[2].partition('"')[0] for line in text.splitlines() if "engine_load{" in line}
    assert found == {"r-engine-0", *(f"127.0.0.1:{engine.port}" for engine in running.engines[1:])}
