"""Tinker's wire: whose things are whose, its own form of errors, and requests that are sent twice."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.pb import tinker_pb2 as pb
from services.common.security.api_keys import Scope
from services.gateway.api.base.routing import resource
from services.gateway.api.training.tinker.future_routes import _widths
from services.gateway.api.training.tinker.records import CheckpointRecord
from services.gateway.api.training.tinker.services import TinkerServices
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, dies, hangs
from tests.unit.gateway.fake_sessions import refused
from tests.unit.gateway.key_file import NO_REDIS, Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.json")
    for name in ("alice", "bob"):
        made.add(name, Scope.TRAIN, Scope.INFERENCE)
    made.add("reader", Scope.INFERENCE)
    return made


@pytest.fixture
def running(start: Starter, keys: Keys) -> Running:
    return start(FakeEngine(), api_keys_file=str(keys.path), redis_url=NO_REDIS)


class Client:
    """One program of a key, as the SDK sends it."""

    def __init__(self, running: Running, key: str | None) -> None:
        headers = {} if key is None else {"x-api-key": f"tml-{key}"}
        self.http = httpx.Client(base_url=f"{running.url}/api/v1", headers=headers, timeout=PATIENCE, trust_env=False)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def session(self) -> str:
        return str(self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"])

    def model(self, session: str, number: int = 0) -> str:
        asked: dict[str, Any] = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        }
        promise = self.post("create_model", **asked)
        made = self.post("retrieve_future", request_id=promise["request_id"])
        return str(made["model_id"])

    def sample(self, session: str, seq: int = 0) -> dict[str, Any]:
        sampler = self.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [97, 98]}]},
            "sampling_params": {"max_tokens": 4},
        }
        return dict(self.post("asample", sampling_session_id=sampler["sampling_session_id"], seq_id=seq, **body))


@pytest.fixture
def alice(running: Running, keys: Keys) -> Iterator[Client]:
    client = Client(running, keys.secrets["alice"])
    yield client
    client.http.close()


@pytest.fixture
def bob(running: Running, keys: Keys) -> Iterator[Client]:
    client = Client(running, keys.secrets["bob"])
    yield client
    client.http.close()


def test_a_key_sees_its_own_things_only(alice: Client, bob: Client) -> None:
    session = alice.session()
    model = alice.model(session)
    assert model == f"{session}:train:0"
    step: dict[str, Any] = {"seq_id": 1, "adam_params": {}}
    call = alice.post("optim_step", model_id=model, **step)
    sample = alice.sample(session)
    bob.post("get_info", 404, model_id=model)
    bob.post("session_heartbeat", 404, session_id=session)
    bob.post("optim_step", 404, model_id=model, **step)
    bob.post("retrieve_future", 404, request_id=call["request_id"])
    bob.post("retrieve_future", 404, request_id=sample["request_id"])
    bob.post("create_sampling_session", 404, session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    assert bob.http.get("training_runs").json()["cursor"]["total_count"] == 0
    assert alice.http.get("training_runs").json()["training_runs"][0]["training_run_id"] == model
    answer = alice.http.post("retrieve_future", json={"request_id": sample["request_id"]})
    assert len(pb.SampleResponse.FromString(answer.content).sequences) == 1


def test_ids_that_a_client_has_made_up(alice: Client) -> None:
    """An id says what its answer needs besides, and is not signed: what is in it may be anything."""
    deep = "[" * 40_000
    things = (
        '["call"',
        "3",
        "[]",
        '["call", 3]',
        '["call", {}]',
        '["made", {"run": 7}]',
        '["sample", {"name": []}]',
        deep,
    )
    for text in things:
        forged = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        alice.post("retrieve_future", 404, request_id=forged)


@pytest.mark.parametrize("widths", [[10**9], [1], [1, 1, 1], [-1, 3], [True, 1], ["2"], "ab", 7, {"a": 1}])
def test_widths_that_are_not_those_of_the_call(widths: Any) -> None:
    with pytest.raises(TypeError):
        _widths({"widths": widths}, 2)
    assert _widths({"widths": [0, 1]}, 2) == [0, 1]
    assert _widths({"widths": [2]}, 2) == [2]
    assert _widths({}, 2) == [0, 0]


def test_errors_have_the_form_of_tinkers_servers(running: Running, alice: Client, keys: Keys) -> None:
    def error(answer: httpx.Response, status: int) -> dict[str, Any]:
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"detail", "category", "code", "param"}
        return dict(answer.json())

    assert error(Client(running, None).http.get("healthz"), 401)["category"] == "user"
    reader = Client(running, keys.secrets["reader"])
    session = reader.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert "lacks the scope train" in error(reader.http.post("create_model", json=body), 403)["detail"]
    assert error(alice.http.get("nowhere"), 404)["detail"].startswith("no such route")
    assert error(alice.http.post("create_session", json={"tags": []}), 400)["param"] == "sdk_version"
    assert error(alice.http.post("forward_backward", content=b"\xff"), 400)["category"] == "user"
    for name in ("nonsense", "WyJjYWxsIix7fV0", "WyJtYWRlIix7fV0"):
        assert error(alice.http.post("retrieve_future", json={"request_id": name}), 404)["param"] == "request_id"
    session = alice.session()
    model = alice.model(session)
    # The SDK asks for minutes again after a 409 or a 503, and slows down after a 429.
    running.engine.sessions.refuses = refused(engine_pb2.ERROR_CODE_OVERLOADED, "4 are open")
    busy = error(alice.http.post("create_model", json=body | {"session_id": session, "model_seq_id": 1}), 429)
    assert busy["category"] == "server"
    running.engine.sessions.refuses = None
    alice.post("optim_step", model_id=model, seq_id=1, adam_params={})
    running.engine.sessions.opened.clear()
    gone = error(alice.http.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}}), 404)
    assert "no such training session" in gone["detail"]
    running.run(_stopped(running))
    assert error(alice.http.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}}), 503)


async def _stopped(running: Running) -> None:
    await running.engine.stop()


def test_a_run_is_opened_once_however_often_it_is_asked_for(running: Running, alice: Client) -> None:
    session = alice.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}

    async def twice() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=alice.http.base_url, headers=alice.http.headers, timeout=PATIENCE
        ) as http:
            return await asyncio.gather(*(http.post("create_model", json=body) for _ in range(3)))

    answers = asyncio.run(twice())
    assert len({answer.json()["request_id"] for answer in answers}) == 1
    assert len(running.engine.sessions.opened) == 1
    (asked,) = running.engine.sessions.opened.values()
    assert (asked.lora.rank, asked.lora.alpha, asked.metadata) == (4, 32.0, {"tinker": f"{session}:train:0"})
    alice.post("session_heartbeat", session_id=session)
    first, again = alice.sample(session), alice.sample(session)
    assert first == again
    alice.post(f"sessions/{session}/finish", 204, reason={"type": "success"}, detail=None)
    assert running.engine.sessions.opened == {}
    alice.post("session_heartbeat", 410, session_id=session)


def test_the_model_may_have_the_name_by_which_programs_know_it(start: Starter) -> None:
    """And weights in flight are the newest ones of their adapter."""
    running = start(FakeEngine(), redis_url=NO_REDIS, tinker_base_model="Qwen/Qwen3.5-4B")
    client = Client(running, "none")
    told = client.http.get("get_server_capabilities").json()["supported_models"]
    assert [one["model_name"] for one in told] == ["Qwen/Qwen3.5-4B"]
    session = client.session()
    asked: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "lora_config": {"rank": 4}}
    promise = client.post("create_model", base_model="Qwen/Qwen3.5-4B", user_metadata={"adapter": "mine"}, **asked)
    model = client.post("retrieve_future", request_id=promise["request_id"])["model_id"]
    assert client.post("get_info", model_id=model)["model_data"]["model_name"] == "Qwen/Qwen3.5-4B"
    running.engine.sessions.results["save"] = {"adapter": "mine@3", "digest": "x", "attached": False}
    policies = []
    for seq, kind in ((1, "snapshot"), (2, "inflight")):
        body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind}
        saved = client.post("retrieve_future", request_id=client.post("save_weights_for_sampler", **body)["request_id"])
        policies.append(saved["sampling_session_id"].rpartition(":")[2])
    assert policies == ["mine@3", "mine"]
    client.http.close()


def test_checkpoints_are_removed_when_their_time_is_over(running: Running, alice: Client) -> None:
    services = resource(running.app, TinkerServices)
    assert services is not None
    model = alice.model(alice.session())
    name, _, number = model.partition(":train:")
    for kept, due in (("short", time.time() - 1), ("long", time.time() + 3600)):
        running.store.put(f"sessions/checkpoints/{name}.{number}.{kept}.safetensors", b"x")
        record = CheckpointRecord(
            run=model,
            owner="",
            kind="weights",
            name=kept,
            target=f"{name}.{number}.{kept}",
            created_at=1.0,
            expires_at=due,
        )
        running.run(services.records.add_checkpoint(record))
    assert running.run(services.records.tidy()) == 1
    assert running.store.list("sessions/checkpoints/") == [f"sessions/checkpoints/{name}.{number}.long.safetensors"]


def test_a_sample_whose_engine_is_lost_is_to_be_asked_for_again(start: Starter) -> None:
    engine = FakeEngine()
    running = start(engine, redis_url=NO_REDIS, engine_retry_seconds=0.1)
    client = Client(running, "none")
    session = client.session()
    engine.behaviour = dies(after="a")
    lost = client.sample(session)["request_id"]
    assert client.http.post("retrieve_future", json={"request_id": lost}).status_code == 410
    running.wait_for(lambda: any(one.ready for one in running.inference.engines.clients))
    engine.behaviour = hangs
    waiting = client.sample(session, 1)["request_id"]
    client.post("cancel_future", 204, request_id=waiting)
    assert client.http.post("retrieve_future", json={"request_id": waiting}).status_code == 410
    client.http.close()
