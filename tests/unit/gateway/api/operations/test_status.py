"""/v1/status, /v1/requests and /v1/keys: what runs now, and who may see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.security.api_keys import KeyLimits, Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, hangs, says
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys

PLAN = {"weights": 100, "kv": 50, "free": 7}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    keys = Keys(tmp_path_factory.mktemp("keys") / "keys.json")
    keys.add("ann", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=600))
    keys.add("bob", Scope.INFERENCE)
    keys.add("admin", Scope.ADMIN)
    return keys


@pytest.fixture
def behind(start: Starter, keys: Keys) -> Running:
    running: Running = start(
        FakeEngine(hangs, memory_plan=PLAN),
        api_keys_file=str(keys.path),
        redis_url=NO_REDIS,
        key_tokens_per_minute=9000,
    )
    return running


@pytest.fixture
def guarded(behind: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=behind.url, timeout=PATIENCE, verify=False) as client:
        yield client


def test_status_of_engines_and_of_the_gateway(start: Starter) -> None:
    engine = FakeEngine(says("Hello"), attached="bot@3", memory_plan=PLAN, name="card-0")
    running: Running = start(engine)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        before = http.get("/v1/status").json()
        assert before["first_token"] == {"bounds": [], "counts": [], "sum": 0.0}
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        status = http.get("/v1/status").json()
    (found,) = status["engines"]
    assert (found["name"], found["ready"], found["attached_adapter"]) == ("card-0", True, "bot@3")
    assert found["memory_plan"] == PLAN
    assert found["tokens"] == {"decode": 40, "prefill": 30, "prompt": 50}
    assert found["cache_hit_tokens"] == {"device": 15, "host": 5}
    assert found["kv_blocks"] == {"used": 1, "cached": 2, "total": 3}
    assert status["gateway"]["id"] == before["gateway"]["id"]
    assert status["gateway"]["ready"] is True
    assert status["model"]["id"] == MODEL
    assert status["queues"]["training"] == {"queued": 0, "running": 0, "dead": 0, "oldest_queued_seconds": 0.0}
    assert status["tokens"]["completion"] == 6, "five letters and the end"
    first = status["first_token"]
    assert len(first["counts"]) == len(first["bounds"]) + 1
    assert sum(first["counts"]) == 1
    assert sum(status["between_tokens"]["counts"]) > 0
    assert status["between_tokens"]["sum"] > 0


def test_an_engine_that_is_away_has_its_reason(start: Starter) -> None:
    running: Running = start(FakeEngine(), FakeEngine(), all_ready=False)
    running.run(running.engines[1].stop())
    running.wait_for(lambda: sum(client.ready for client in running.inference.engines.clients) == 1)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        present, away = sorted(http.get("/v1/status").json()["engines"], key=lambda engine: not engine["ready"])
        assert present["error"] is None
        assert away["ready"] is False


def test_a_caller_sees_its_requests_and_an_admin_all(behind: Running, guarded: httpx.Client, keys: Keys) -> None:
    def chat(name: str) -> None:
        guarded.post("/v1/chat/completions", json=CHAT, headers=keys.bearer(name))

    async def end() -> None:
        behind.inference.engines.end_requests("the test is over")

    def seen(name: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = guarded.get("/v1/requests", headers=keys.bearer(name)).json()["data"]
        return found

    waiting = [threading.Thread(target=chat, args=(name,)) for name in ("ann", "ann", "bob")]
    for thread in waiting:
        thread.start()
    while len(seen("admin")) < 3:
        pass
    assert {one["key_id"] for one in seen("ann")} == {keys.entries["ann"].id}
    assert len(seen("ann")) == 2
    assert len(seen("bob")) == 1
    (one,) = seen("bob")
    prompt = next(r.prompt_token_ids for r in behind.engine.requests if r.request_id == one["id"])
    assert (one["phase"], one["prompt_tokens"], one["rollout"]) == ("waiting", len(prompt), False)
    limited = guarded.get("/v1/requests", params={"limit": 1}, headers=keys.bearer("admin")).json()
    assert (len(limited["data"]), limited["total"], limited["unreachable"]) == (1, 3, [])
    behind.run(end())
    for thread in waiting:
        thread.join()


def test_an_engine_of_an_earlier_release_lists_nothing(start: Starter) -> None:
    running: Running = start(FakeEngine(lists_requests=False))
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert http.get("/v1/requests").json() == {"object": "list", "data": [], "total": 0, "unreachable": []}


def test_keys_and_limits(guarded: httpx.Client, keys: Keys) -> None:
    mine = guarded.get("/v1/keys", headers=keys.bearer("ann")).json()
    ann = keys.entries["ann"]
    assert (mine["required"], mine["caller"], mine["scopes"]) == (True, ann.id, ["inference"])
    (entry,) = mine["data"]
    assert (entry["id"], entry["name"], entry["valid"]) == (ann.id, "ann", True)
    assert entry["limits"] == {"requests_per_minute": 600, "tokens_per_minute": 9000, "concurrent_requests": 0}
    everybody = guarded.get("/v1/keys", headers=keys.bearer("admin"))
    assert {one["id"] for one in everybody.json()["data"]} == {key.id for key in keys.entries.values()}
    assert "sha256" not in everybody.text
    assert all(secret not in everybody.text for secret in keys.secrets.values())
    assert guarded.get("/v1/keys").status_code == 401


def test_without_keys_everybody_may_do_everything(http: httpx.Client) -> None:
    assert http.get("/v1/keys").json() == {
        "object": "list",
        "required": False,
        "caller": None,
        "scopes": sorted(Scope),
        "data": [],
    }


def test_every_phase_has_a_name() -> None:
    from services.gateway.api.operations.status import _PHASES

    assert set(_PHASES) == set(engine_pb2.RequestPhase.values()) - {engine_pb2.REQUEST_PHASE_UNSPECIFIED}
