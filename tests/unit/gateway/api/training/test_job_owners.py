"""What one API key gets of what another has made: jobs, sessions and completions; and the right to attach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of

SFT: dict[str, Any] = {"adapter": "polite", "examples": [{"prompt": "2+2", "completion": "4"}]}
BOTH = (Scope.INFERENCE, Scope.TRAIN)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    found = Keys(tmp_path_factory.mktemp("owners") / "keys.json")
    found.add("alice", *BOTH)
    found.add("bob", *BOTH)
    found.add("operator", Scope.ADMIN)
    found.add("pipeline", *BOTH, Scope.ATTACH)
    return found


@pytest.fixture
def door(start: Starter, keys: Keys) -> Running:
    return start(api_keys_file=str(keys.path), redis_url=NO_REDIS)


@pytest.fixture
def callers(door: Running, keys: Keys) -> Iterator[dict[str, httpx.Client]]:
    """A client a key."""
    clients = {
        name: httpx.Client(base_url=door.url, headers=keys.bearer(name), timeout=PATIENCE, trust_env=False)
        for name in keys.entries
    }
    yield clients
    for client in clients.values():
        client.close()


def test_jobs_belong_to_their_key(callers: dict[str, httpx.Client], keys: Keys) -> None:
    alice, bob, operator = (callers[name] for name in ("alice", "bob", "operator"))
    job = alice.post("/v1/train/sft", json=SFT).json()
    assert job["key_id"] == keys.entries["alice"].id
    path = f"/v1/train/jobs/{job['id']}"
    assert [each["id"] for each in alice.get("/v1/train/jobs").json()["data"]] == [job["id"]]
    assert bob.get("/v1/train/jobs").json()["data"] == []
    for refused in (
        bob.get(path),
        bob.get(f"{path}/events"),
        bob.post(f"{path}/cancel"),
        bob.get("/v1/train/jobs", params={"after": job["id"]}),
    ):
        assert error_of(refused, 404)["message"] == error_of(bob.get("/v1/train/jobs/" + job["id"]), 404)["message"]
    assert alice.get(path).json()["state"] == "queued", "nobody cancelled it"
    assert operator.get("/v1/train/jobs").json()["data"][0]["id"] == job["id"], "an admin sees everybody's"
    assert operator.post(f"{path}/cancel").json()["state"] == "cancelled"
    error_of(operator.post("/v1/train/sft", json=SFT), 403)


def test_idempotency_keys_belong_to_their_key(callers: dict[str, httpx.Client]) -> None:
    alice, bob = callers["alice"], callers["bob"]
    header = {"idempotency-key": "nightly"}
    first = alice.post("/v1/train/sft", json=SFT, headers=header).json()
    assert alice.post("/v1/train/sft", json=SFT, headers=header).json()["id"] == first["id"]
    other = bob.post("/v1/train/sft", json=SFT | {"adapter": "bobs"}, headers=header)
    assert other.status_code == 202, "another key's use of the name is no conflict"
    assert other.json()["id"] != first["id"]


def test_completions_are_trained_on_by_who_sampled_them(
    door: Running, callers: dict[str, httpx.Client], keys: Keys
) -> None:
    completion = (
        callers["alice"].post("/v1/completions", json={"model": "tiny", "prompt": "2+2", "max_tokens": 4}).json()
    )
    (request,) = door.engine.requests
    assert request.owner == keys.entries["alice"].id
    for number in range(2):
        name = f"{completion['id']}-{number}"
        door.engine.rollouts[name] = engine_pb2.Rollout(
            completion_id=name, prompt_token_ids=[50], token_ids=[51 + number], sampling_logprobs=[-1.0],
            temperature=1.0, finish_reason=engine_pb2.FINISH_REASON_STOP, owner=request.owner,
        )  # fmt: skip
    rollouts = [{"completion_id": name, "reward": place} for place, name in enumerate(door.engine.rollouts)]
    for name in ("bob", "pipeline"):
        refused = callers[name].post("/v1/train/grpo", json={"adapter": name, "rollouts": rollouts})
        assert "no engine remembers" in error_of(refused, 404)["message"]
    taken = callers["alice"].post("/v1/train/grpo", json={"adapter": "sums", "rollouts": rollouts})
    assert taken.status_code == 202, taken.text


def test_training_sessions_belong_to_their_key(door: Running, callers: dict[str, httpx.Client]) -> None:
    alice, bob = callers["alice"], callers["bob"]
    session = alice.post("/v1/train/sessions", json={"lora": {"rank": 8}}).json()["id"]
    path = f"/v1/train/sessions/{session}"
    step = {"seq": 1, "learning_rate": 0.1}
    assert [each["id"] for each in alice.get("/v1/train/sessions").json()["data"]] == [session]
    assert bob.get("/v1/train/sessions").json()["data"] == []
    for refused in (bob.get(path), bob.post(f"{path}/optim_step", json=step), bob.delete(path)):
        error_of(refused, 404)
    future = alice.post(f"{path}/optim_step", json=step)
    assert future.status_code == 202, future.text
    error_of(bob.get(f"/v1/train/futures/{future.json()['id']}"), 404)
    assert alice.get(f"/v1/train/futures/{future.json()['id']}").json()["state"] == "done"


def test_attaching_is_a_right_of_its_own(door: Running, callers: dict[str, httpx.Client]) -> None:
    alice, pipeline = callers["alice"], callers["pipeline"]
    absent = alice.post("/v1/train/sft", json=SFT).json()["id"]
    assert not door.queue.specs[absent].attach, "left open, it is what the key may"
    error = error_of(alice.post("/v1/train/sft", json=SFT | {"attach": True}), 403)
    assert (error["param"], error["code"]) == ("attach", "insufficient_scope")
    assert "attach or admin" in error["message"]
    assert door.queue.specs[pipeline.post("/v1/train/sft", json=SFT).json()["id"]].attach
    session = alice.post("/v1/train/sessions", json={"lora": {"rank": 8}}).json()["id"]
    save = {"seq": 1, "name": "polite", "attach": True}
    error_of(alice.post(f"/v1/train/sessions/{session}/save", json=save), 403)
    door.registry.publish("polite", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, base_digest="")
    for action in ("attach", "detach", "rollback"):
        error_of(
            alice.post(f"/v1/adapters/polite/{action}", json={"version": 1} if action == "rollback" else None), 403
        )
    assert pipeline.post("/v1/adapters/polite/attach").status_code == 200
    assert pipeline.post("/v1/adapters/polite/detach").status_code == 200
    error_of(pipeline.delete("/v1/adapters/polite"), 403)


def test_prompts_are_cached_by_key(door: Running, callers: dict[str, httpx.Client], start: Starter) -> None:
    prompt = {"model": "tiny", "prompt": "a secret beginning", "max_tokens": 2}
    for name in ("alice", "alice", "bob"):
        assert callers[name].post("/v1/completions", json=prompt).status_code == 200
    one, same, other = (request.cache_salt for request in door.engine.requests)
    assert one == same != other, "who guesses a text does not learn whether another key has sent it"
    keyless = start()
    with httpx.Client(base_url=keyless.url, trust_env=False, timeout=PATIENCE) as http:
        assert http.post("/v1/completions", json=prompt).status_code == 200
    assert keyless.engine.requests[0].cache_salt == "", "one caller, one cache"
