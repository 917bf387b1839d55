"""Canaries over HTTP: two gateways on a real Valkey and S3 server, in front of scripted engines that follow the
pointers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.batches.stores import open_batching
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, Send, fails, says
from tests.unit.gateway.key_file import Keys

ONE, TWO = AdapterVersion("toy", 1), AdapterVersion("toy", 2)
HEADER = "x-temper-canary"


class Following(FakeEngine):
    """An engine that answers with what the pointers say."""

    registry: AdapterRegistry
    candidate: Behaviour = staticmethod(says("Better"))

    def adapter_of(self, request: engine_pb2.GenerateRequest) -> str:
        if request.adapter.attached:
            return str(self.registry.attached() or "")
        if request.adapter.base:
            return ""
        named = request.adapter.named
        return f"{named.name}@{named.version}" if named.version else str(self.registry.current(named.name))


async def by_version(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
    assert isinstance(engine, Following)
    behave = engine.candidate if engine.adapter_of(request) == str(TWO) else says("Hello")
    await behave(engine, request, send)


class Fleet:
    """Two gateways, an engine each, and the adapter `toy`, whose first version is current and attached."""

    def __init__(self, gateways: list[Running], registry: AdapterRegistry, keys: Keys) -> None:
        self.gateways, self.registry, self.keys = gateways, registry, keys
        self._client = httpx.Client(timeout=PATIENCE, trust_env=False)

    def call(self, method: str, path: str, *, key: str = "admin", at: int = 0, **options: Any) -> httpx.Response:
        headers = self.keys.bearer(key) | options.pop("headers", {})
        return self._client.request(method, self.gateways[at].url + path, headers=headers, **options)

    def ask(self, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        answer = self.try_to_ask(path, **options)
        assert answer.status_code == 200, answer.text
        return answer

    def try_to_ask(
        self, path: str = "/v1/chat/completions", *, at: int = 0, headers: Any = (), **body: Any
    ) -> httpx.Response:
        given: dict[str, Any] = {"model": MODEL}
        if path in ("/v1/chat/completions", "/v1/messages"):
            given["messages"] = [{"role": "user", "content": "hi"}]
        return self.call("POST", path, key="app", at=at, json=given | body, headers=dict(headers))

    def begin(self, **policy: Any) -> dict[str, Any]:
        """A canary that both gateways know."""
        made = self.call("POST", "/v1/canaries", json={"version": str(TWO), "policy": {"share": 0.5, **policy}})
        assert made.status_code == 201, made.text
        canary: dict[str, Any] = made.json()
        self.until(lambda: all(one.inference.canaries._routes for one in self.gateways))  # type: ignore[union-attr]
        return canary

    def get(self, canary: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/canaries/{canary['id']}", at=1).json()
        return found

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def fleet(valkey: RunningServer, settings: CommonSettings, store: ObjectStore, tmp_path: Path) -> Iterator[Fleet]:
    keys = Keys(tmp_path / "keys.json")
    keys.add("app", Scope.INFERENCE)
    keys.add("trainer", Scope.TRAIN)
    keys.add("admin", Scope.ADMIN, Scope.INFERENCE)
    registry = AdapterRegistry(store, MODEL)
    for current in (True, False):
        registry.publish("toy", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="", current=current)
    registry.attach(ONE)
    names = ("redis_url", "s3_endpoint", "s3_access_key", "s3_secret_key", "s3_bucket")
    stores = {name: getattr(settings, name) for name in names}
    gateways = []
    for _ in range(2):
        engine = Following(behaviour=by_version)
        engine.registry = registry
        running = Running([engine], batching=open_batching, learns=True, api_keys_file=str(keys.path), **stores)
        running.registry = registry
        gateways.append(running)
        running.start()
    yield Fleet(gateways, registry, keys)
    for running in gateways:
        running.stop()


def digits(answer_id: str) -> str:
    return answer_id.partition("-")[2] or answer_id.partition("_")[2]


def target(said: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in said.items() if name.endswith("_id")}


def test_a_better_version_is_promoted_everywhere(fleet: Fleet) -> None:
    """By what users say of its answers, on all surfaces and both gateways."""
    canary = fleet.begin(gain=1)
    assert (canary["state"], canary["current"], canary["attached"]) == ("running", str(ONE), True)
    arms: dict[str, set[str]] = {}

    def visit(number: int) -> dict[str, str]:
        surface = SURFACES[number % len(SURFACES)]
        path, target, more = surface
        session = {"x-session-id": f"s-{number}"}
        for at in (0, 1) if number < 20 else (number % 2,):
            answer = fleet.ask(path, at=at, headers=session, **more)
            told = answer.headers[HEADER]
            assert told in (f"{canary['id']}; arm=candidate", f"{canary['id']}; arm=current")
            arm = told.rpartition("=")[2]
            arms.setdefault(session["x-session-id"], set()).add(arm)
            version = str(TWO if arm == "candidate" else ONE)
            assert answer.headers["x-temper-adapter"] == version
            body = answer.json()
            assert (body.get("adapter") or body["choices"][0]["adapter"]) == version
            assert len(digits(body["id"])) == 32
        return {target: body["id"], "thumb": "up" if arm == "candidate" else "down", "user": f"user-{number}"}

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(visit, range(90)))
        judged = [
            {"score": 0.25 if one["thumb"] == "down" else -0.5, "source": "judge"} | target(one) for one in said[:20]
        ]
        for one in judged:
            fleet.call("POST", "/v1/feedback", key="app", json=one).raise_for_status()
        given = pool.map(lambda one: fleet.call("POST", "/v1/feedback", key="app", json=one).status_code, said)
        assert set(given) == {201}
    assert all(len(one) == 1 for one in arms.values()), "a session stays in its arm"
    fleet.until(lambda: fleet.get(canary)["state"] == "promoted")
    fleet.until(lambda: not any(HEADER in fleet.ask(at=at).headers for at in (0, 1)))
    for at in (0, 1):
        assert fleet.ask(at=at).headers["x-temper-adapter"] == str(TWO)
        assert fleet.ask(at=at, model="toy").headers["x-temper-adapter"] == str(TWO)
    ended = fleet.get(canary)
    assert ended["decision"]["reason"] == "better"
    arms_told = (ended["evidence"]["current"], ended["evidence"]["candidate"])
    assert [arm["version"] for arm in arms_told] == [str(ONE), str(TWO)]
    assert all(arm["voices"] >= 30 for arm in arms_told)
    assert [arm["score"] for arm in arms_told] == [-1, 1]
    judges = [arm["others"]["judge"] for arm in arms_told]
    assert [one["score"] for one in judges] == [0.25, -0.5], "a judge is shown, and does not decide"
    assert sum(one["opinions"] for one in judges) == 20
    assert fleet.call("GET", "/v1/canaries?state=promoted&adapter=toy").json()["data"] == [ended]
    metrics = "".join(httpx.get(one.url + "/metrics", timeout=PATIENCE).text for one in fleet.gateways)
    assert 'temper_gateway_canaries_ended_total{reason="better",state="promoted"} 1.0' in metrics
    assert 'temper_gateway_canary_answers_total{adapter="toy",arm="candidate",outcome="stop"}' in metrics


SURFACES: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "completion_id", {}),
    ("/v1/completions", "completion_id", {"prompt": "once"}),
    ("/v1/responses", "response_id", {"input": "hi"}),
    ("/v1/messages", "message_id", {"max_tokens": 64}),
    ("/v1/chat/completions", "completion_id", {"model": "toy"}),
]


def test_a_version_that_fails_is_rolled_back_at_once(fleet: Fleet) -> None:
    for running in fleet.gateways:
        engine = running.engine
        assert isinstance(engine, Following)
        engine.candidate = fails(engine_pb2.ERROR_CODE_INTERNAL, "it does not work")
    canary = fleet.begin(share=0.25)
    statuses = []
    deadline = time.monotonic() + PATIENCE
    while fleet.get(canary)["state"] == "running":
        assert time.monotonic() < deadline
        statuses += [fleet.try_to_ask(at=number % 2).status_code for number in range(10)]
    ended = fleet.get(canary)
    assert (ended["state"], ended["decision"]["reason"]) == ("rolled_back", "guardrail")
    assert ended["decision"]["detail"].startswith("crossed: errors")

    def back() -> bool:  # within a poll of each gateway; until then the candidate goes on failing
        answers = [fleet.try_to_ask(at=at) for at in (0, 1)]
        return all(answer.status_code == 200 and HEADER not in answer.headers for answer in answers)

    fleet.until(back)
    assert (fleet.registry.current("toy"), fleet.registry.attached()) == (ONE, ONE)


@pytest.mark.thorough
def test_a_version_that_refuses_is_rolled_back(fleet: Fleet) -> None:
    for running in fleet.gateways:
        engine = running.engine
        assert isinstance(engine, Following)
        engine.candidate = says("Ask somebody else, please.")
    limits = dict.fromkeys(("length", "latency", "cut_off", "repetition", "broken_calls", "errors"))
    canary = fleet.begin(refusals=["ask somebody ELSE"], guardrails=limits)
    deadline = time.monotonic() + PATIENCE
    while fleet.get(canary)["state"] == "running":
        assert time.monotonic() < deadline
        for number in range(10):
            fleet.ask(at=number % 2)
    ended = fleet.get(canary)
    assert (ended["state"], ended["decision"]["reason"]) == ("rolled_back", "guardrail")
    assert ended["decision"]["detail"].startswith("crossed: refusals")
    arms = {arm: ended["evidence"][arm] for arm in ("current", "candidate")}
    assert (arms["current"]["refusals"], arms["candidate"]["refusals"]) == (0, arms["candidate"]["answers"])


def test_a_session_counts_in_each_canary_that_answered_in_it(fleet: Fleet, raw: redis.Redis) -> None:
    for current in (True, False):
        fleet.registry.publish("other", {WEIGHTS: b"o", CONFIG: b"{}"}, base_digest="", current=current)
    canaries = [fleet.begin()]
    body = {"version": "other@2", "policy": {"share": 0.5}}
    canaries.append(fleet.call("POST", "/v1/canaries", json=body).raise_for_status().json())
    fleet.until(lambda: all(len(one.inference.canaries._routes) == 2 for one in fleet.gateways))  # type: ignore[union-attr]
    talks = {"toy": ["s-1", "s-2"], "other": ["s-2", "s-3"]}
    arms = dict[tuple[str, str], str]()
    for adapter, sessions in talks.items():
        for number, session in enumerate(sessions):
            answer = fleet.ask(at=number, model=adapter, headers={"x-session-id": session})
            arms[adapter, session] = answer.headers[HEADER].partition("arm=")[2]
    for session in ("s-1", "s-2", "s-3", "s-4"):
        said = {"session_id": session, "score": 0.5, "user": f"of {session}"}
        assert fleet.call("POST", "/v1/feedback", key="app", json=said).status_code == 201

    def counted() -> list[dict[str, int]]:
        looks = [fleet.get(one)["evidence"] or {} for one in canaries]
        return [{arm: look[arm]["voices"] for arm in ("current", "candidate")} if look else {} for look in looks]

    expected = [
        {arm: [arms[adapter, one] for one in sessions].count(arm) for arm in ("current", "candidate")}
        for adapter, sessions in talks.items()
    ]
    fleet.until(lambda: counted() == expected)
    for canary in canaries:
        assert raw.scard(f"temper:canaries:{canary['id']}:sessions") == 2
        fleet.call("POST", f"/v1/canaries/{canary['id']}/decide", json={"decision": "roll_back"}).raise_for_status()
        assert not raw.exists(f"temper:canaries:{canary['id']}:sessions")


@pytest.mark.thorough
def test_who_names_a_version_has_no_part_and_streams_tell(fleet: Fleet) -> None:
    canary = fleet.begin()
    for more in ({"model": "toy@1"}, {"adapter": "toy@2"}, {"adapter": "base"}):
        for _ in range(4):
            assert HEADER not in fleet.ask(**more).headers
    seen = set()
    for number in range(40):
        answer = fleet.ask(stream=True, user=f"user-{number}")
        arm = answer.headers[HEADER].rpartition("=")[2]
        assert fleet.ask(user=f"user-{number}", at=1).headers[HEADER] == answer.headers[HEADER]
        first = json.loads(answer.text.splitlines()[0].removeprefix("data: "))
        said = {"completion_id": first["id"], "score": 0.5 if arm == "candidate" else -0.5}
        fleet.call("POST", "/v1/feedback", key="app", json=said)
        seen.add(arm)
    assert seen == {"current", "candidate"}
    background = fleet.ask("/v1/responses", input="hi", background=True)
    assert background.headers[HEADER].startswith(canary["id"])

    def counted() -> bool:
        evidence = fleet.get(canary)["evidence"]
        scores = {arm: evidence[arm]["score"] for arm in seen}
        voices = sum(evidence[arm]["voices"] for arm in seen)
        return voices == 40 and scores == {"candidate": 0.5, "current": -0.5}

    fleet.until(counted)


def test_one_canary_an_adapter_and_a_person_decides(fleet: Fleet) -> None:
    body = {"version": str(TWO)}
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda at: fleet.call("POST", "/v1/canaries", at=at % 2, json=body), range(8)))
    assert sorted(answer.status_code for answer in made) == [201, *[409] * 7]
    canary = next(answer.json() for answer in made if answer.status_code == 201)
    assert fleet.call("POST", "/v1/canaries", json={"version": str(ONE)}).status_code == 409
    assert fleet.call("POST", "/v1/canaries", json={"version": "toy@9"}).status_code == 404
    path = f"/v1/canaries/{canary['id']}"
    for key, status in (("app", 403), ("trainer", 403)):
        assert fleet.call("POST", f"{path}/decide", key=key, json={"decision": "promote"}).status_code == status
    assert fleet.call("GET", path, key="trainer").status_code == 200
    assert fleet.call("GET", path, key="app").status_code == 403
    said = {"decision": "promote", "reason": "I have seen enough"}
    decided = fleet.call("POST", f"{path}/decide", json=said).json()
    assert decided["state"] == "promoting"
    fleet.until(lambda: fleet.get(canary)["state"] == "promoted")
    ended = fleet.get(canary)
    by = ended["decision"].pop("by")
    assert by.startswith("k-")
    assert ended["decision"] == {"outcome": "promote", "reason": "person", "detail": said["reason"]}
    assert (fleet.registry.current("toy"), fleet.registry.attached()) == (TWO, TWO)
    again = fleet.call("POST", f"{path}/decide", json={"decision": "roll_back"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


def test_without_redis_all_get_the_current_version(fleet: Fleet, valkey: RunningServer) -> None:
    fleet.begin()
    valkey.stop(signal.SIGKILL)
    try:
        fleet.until(lambda: not any(HEADER in fleet.ask(at=at).headers for at in (0, 1) for _ in range(4)))
        assert fleet.ask().headers["x-temper-adapter"] == str(ONE)
    finally:
        valkey.start()
