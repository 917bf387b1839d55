"""Engines that sleep, as clients of a gateway see them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


def states(answer: httpx.Response) -> list[str]:
    assert answer.status_code in (200, 202), answer.text
    return [one["state"] for one in answer.json()["data"]]


def restarted(running: Running) -> None:
    """The engine's process is another one on the same port."""

    async def restart() -> None:
        port = running.engine.port
        await running.engine.stop()
        await running.engine.start(port)

    running.run(restart())


def test_requests_hear_that_the_engine_sleeps_until_it_is_woken(start: Starter) -> None:
    running = start(engine_retry_seconds=0.2)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert states(http.get("/v1/engine")) == ["awake"]
        assert states(http.post("/v1/engine/sleep")) == ["going_to_sleep"]
        restarted(running)
        running.wait_for(lambda: states(http.get("/v1/engine")) == ["asleep"])
        assert states(http.post("/v1/engine/sleep")) == ["asleep"]
        running.wait_for(lambda: http.get("/readyz").status_code == 503)
        running.wait_for(lambda: "asleep" in http.get("/healthz").json()["engines"][0].get("error", ""))
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "POST /v1/engine/wake" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        assert states(http.post("/v1/engine/wake")) == ["waking"]
        running.wait_for(lambda: http.get("/readyz").status_code == 200)
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert states(http.post("/v1/engine/wake")) == ["awake"]


def test_requests_wait_for_an_engine_that_starts_beside_one_that_sleeps(start: Starter) -> None:
    running = start(FakeEngine(), FakeEngine(), engine_start_seconds=PATIENCE, engine_retry_seconds=0)
    sleeper, starter = running.engines
    port = starter.port
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http, ThreadPoolExecutor(1) as threads:
        sleeper.asleep = True
        restarted(running)
        running.run(starter.stop())
        engines = running.inference.engines
        running.wait_for(lambda: not engines.ready and any("asleep" in one.last_error for one in engines.clients))
        asked = threads.submit(http.post, "/v1/chat/completions", json=CHAT)
        running.wait_for(lambda: engines.waiting == 1)
        running.run(starter.start(port))
        assert asked.result(PATIENCE).status_code == 200


def test_one_engine_of_several_is_chosen(start: Starter) -> None:
    running = start(FakeEngine(name="first"), FakeEngine(name="second"))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        listed: list[dict[str, Any]] = http.get("/v1/engine").json()["data"]
        assert [one["name"] for one in listed] == ["first", "second"]
        assert states(http.post("/v1/engine/sleep", params={"engine": "second"})) == ["going_to_sleep"]
        assert [engine.asleep for engine in running.engines] == [False, True]
        assert states(http.post("/v1/engine/wake", params={"engine": listed[1]["id"]})) == ["waking"]
        assert [engine.asleep for engine in running.engines] == [False, False]
        unknown = http.post("/v1/engine/sleep", params={"engine": "third"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "engine")


def test_an_engine_that_cannot_sleep_says_so(start: Starter) -> None:
    running = start(FakeEngine(sleeps=False))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        refused = http.post("/v1/engine/sleep")
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "engine")


def test_levels_are_the_engines_own(start: Starter) -> None:
    running = start()
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        refused = http.post("/v1/engine/sleep", params={"level": "weights"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
        assert "its levels are cache, process" in refused.json()["error"]["message"]
        assert http.post("/v1/engine/sleep", params={"level": "deep"}).status_code == 400
        assert not running.engine.asleep
        assert states(http.post("/v1/engine/sleep", params={"level": "cache"})) == ["going_to_sleep"]
        again = http.post("/v1/engine/sleep", params={"level": "process"}).json()["data"][0]
        assert (again["state"], again["level"]) == ("asleep", "cache")
        running.engine.memory_taken = True
        taken = http.post("/v1/engine/wake")
        assert taken.status_code == 409
        assert "somebody else has the memory" in taken.json()["error"]["message"]
        running.engine.memory_taken = False
        assert states(http.post("/v1/engine/wake")) == ["waking"]
        assert http.get("/v1/engine").json()["data"][0]["level"] is None
