"""/v1/logs: lines of the gateway and of its engines, who may read them, and how they are followed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of

LOGS = "/v1/logs"


@pytest.fixture
def running(start: Starter) -> Running:
    found: Running = start(FakeEngine(name="card-0"), FakeEngine(name="card-1"))
    return found


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as client:
        yield client


def own(running: Running, message: str, level: str = "info", **fields: object) -> None:
    running.recent(None, level, {"event": message, "level": level, "logger": "gateway", **fields})


def read(http: httpx.Client, **query: str | int | float) -> list[str]:
    answer = http.get(LOGS, params=query).raise_for_status().json()
    assert answer["unreachable"] == []
    return [f"{line['process']} {line['message']}" for line in answer["data"]]


def test_lines_of_all_processes_by_time(running: Running, http: httpx.Client) -> None:
    own(running, "begin")
    for engine, at in zip(running.engines, (5e9, 6e9), strict=True):
        engine.log = [engine_pb2.LogLine(number=1, time=at, level="warning", message="hot", fields='{"celsius": 90}')]
    found = http.get(LOGS).json()
    assert found["processes"] == ["gateway", "card-0", "card-1"]
    assert [line["process"] for line in found["data"]] == ["gateway", "card-0", "card-1"]
    assert found["data"][-1]["fields"] == {"celsius": 90}
    assert len({line["id"] for line in found["data"]}) == 3
    assert read(http, process="card-1") == ["card-1 hot"]
    assert read(http, limit=1) == ["card-1 hot"]
    assert read(http, process="gateway", level="warning") == []
    assert running.engines[0].asked_logs[-1].limit == 1, "each engine filters by itself"
    message = error_of(http.get(LOGS, params={"process": "card-9"}), 404)["message"]
    assert message == "there is no process 'card-9': there are gateway, card-0, card-1"


def test_engines_are_asked_for_a_request_by_its_completions(running: Running, http: httpx.Client) -> None:
    own(running, "request", request_id="mine", completion_id="chatcmpl-1")
    own(running, "request", request_id="other", completion_id="chatcmpl-2")
    assert read(http, request_id="mine") == ["gateway request"]
    assert list(running.engine.asked_logs[-1].request_ids) == ["chatcmpl-1", "mine"]


def test_new_lines_are_followed_once(running: Running, http: httpx.Client) -> None:
    own(running, "before")
    engine = running.engine
    seen = []
    with http.stream("GET", LOGS, params={"follow": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            seen.append(json.loads(line.removeprefix("data:"))["message"])
            if seen == ["before"]:
                engine.log = [engine_pb2.LogLine(number=1, time=1.0, level="info", message="first")]
            elif seen == ["before", "first"]:
                own(running, "second")
            else:
                break
    assert seen == ["before", "first", "second"]
    assert engine.asked_logs[-1].process == engine.sessions.instance
    engine.break_logs = True
    assert http.get(LOGS).json()["unreachable"] == ["card-0"]


def test_an_engine_of_an_earlier_release_has_none(running: Running, http: httpx.Client) -> None:
    for engine in running.engines:
        engine.keeps_logs = False
    own(running, "alone")
    assert read(http) == ["gateway alone"]


def test_only_an_admin_reads_them(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    keys.add("trainer", Scope.INFERENCE, Scope.TRAIN, Scope.ATTACH)
    keys.add("admin", Scope.ADMIN)
    running: Running = start(FakeEngine(), api_keys_file=str(keys.path), redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as client:
        error_of(client.get(LOGS), 401)
        error_of(client.get(LOGS, headers=keys.bearer("trainer")), 403)
        assert client.get(LOGS, headers=keys.bearer("admin")).status_code == 200
