"""Training jobs over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from services.common.errors import NotFound
from services.common.jobs import GrpoJob
from services.common.pb import engine_pb2
from services.common.queue.records import SPEC, spec_json
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter

SFT = {"adapter": "bot", "examples": [{"prompt": "2+2", "completion": "4"}], "epochs": 2, "learning_rate": 1e-3}
OPD: dict[str, Any] = {"adapter": "bot", "prompts": ["2+2"], "teacher": "checkpoint", "rounds": 1, "max_tokens": 4}
GRPO = {"adapter": "bot", "prompt": "2+2", "completions": ["4", "5"], "rewards": [1.0, 0.0], "learning_rate": 1e-4}


def publish(running: Running, name: str) -> None:
    """A next version of the adapter."""
    running.registry.publish(name, {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, base_digest="x")


def remember(running: Running, completion_id: str, prompt: list[int], tokens: list[int], **more: Any) -> None:
    if not running.registry.versions("bot"):
        publish(running, "bot")
    running.engine.rollouts[completion_id] = engine_pb2.Rollout(
        completion_id=completion_id,
        prompt_token_ids=prompt,
        token_ids=tokens,
        sampling_logprobs=[-0.5] * len(tokens),
        temperature=1.0,
        adapter="bot@1",
        finish_reason=more.get("reason", engine_pb2.FINISH_REASON_STOP),
    )


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def test_submit_and_look(running: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/train/sft", json=SFT)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["state"], job["kind"], job["adapter"]) == ("queued", "sft", "bot")
    assert answer.headers["location"] == f"/v1/train/jobs/{job['id']}"
    assert http.get(f"/v1/train/jobs/{job['id']}").json() == job
    assert job in http.get("/v1/train/jobs").json()["data"]
    assert http.post(f"/v1/train/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    assert http.get("/v1/train/jobs", params={"state": "cancelled"}).json()["data"][0]["id"] == job["id"]


def test_grpo_shapes(running: Running, http: httpx.Client) -> None:
    assert http.post("/v1/train/grpo", json=GRPO).status_code == 202
    group = {
        "prompt_token_ids": [1, 2],
        "completions": [{"token_ids": [3], "logprobs": [-0.5], "reward": 1}, {"text": "no", "reward": 0}],
    }
    assert http.post("/v1/train/grpo", json={"adapter": "bot", "groups": [group]}).status_code == 202


def test_completion_ids_become_rollouts(running: Running, http: httpx.Client) -> None:
    remember(running, "c:0", [1, 2], [3, 4])
    remember(running, "c:1", [1, 2], [5], reason=engine_pb2.FINISH_REASON_LENGTH)
    remember(running, "d", [7], [8])
    scored = [{"completion_id": i, "reward": r} for i, r in (("c:0", 1.0), ("d:0", 0.5), ("c:1", 0.0))]
    job = http.post("/v1/train/grpo", json={"adapter": "bot", "rollouts": scored}).json()
    spec = running.queue.specs[job["id"]]
    assert isinstance(spec, GrpoJob)
    assert spec.rollouts is None
    assert [group.prompt_token_ids for group in spec.groups] == [[1, 2], [7]]
    first, second = spec.groups[0].completions
    assert (first.token_ids, first.logprobs, first.reward, first.truncated) == ([3, 4], [-0.5, -0.5], 1.0, False)
    assert (second.token_ids, second.truncated, second.adapter) == ([5], True, "bot@1")
    GrpoJob.model_validate_json(spec.model_dump_json())

    groups = [{"completions": scored[::2]}]
    job = http.post("/v1/train/grpo", json={"adapter": "bot", "groups": groups}).json()
    assert running.queue.specs[job["id"]].groups[0].prompt_token_ids == [1, 2]


def test_more_completion_ids_than_a_message_takes(running: Running, http: httpx.Client) -> None:
    scored = []
    for number in range(150):
        remember(running, f"c{number}", [1], [number % 200])
        scored.append({"completion_id": f"c{number}", "reward": number})
    job = http.post("/v1/train/grpo", json={"adapter": "bot", "rollouts": scored}).json()
    (group,) = running.queue.specs[job["id"]].groups
    assert [completion.token_ids for completion in group.completions] == [[number % 200] for number in range(150)]


def test_completion_ids_refused(running: Running, http: httpx.Client) -> None:
    remember(running, "c", [1], [3])
    remember(running, "d", [2], [3])
    scored = [{"completion_id": "c", "reward": 1}, {"completion_id": "gone", "reward": 1}]
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "rollouts": scored}), 404)
    assert "gone" in error["message"]
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "rollouts": scored[:1] * 2}))
    assert "twice" in error["message"]
    mixed = [{"completions": [{"completion_id": i, "reward": 1} for i in ("c", "d")]}]
    error = refusal(http.post("/v1/train/grpo", json={"adapter": "bot", "groups": mixed}))
    assert error["param"] == "groups[0]"


def sampled_by(*samplers: str | None) -> dict[str, Any]:
    completions = [
        {"token_ids": [3], "logprobs": [-0.5], "reward": number} | ({} if name is None else {"adapter": name})
        for number, name in enumerate(samplers)
    ]
    return {"adapter": "bot", "groups": [{"prompt_token_ids": [1, 2], "completions": completions}]}


@pytest.mark.parametrize("sampler", ["bot", "bot@0", "bot@", "@1", "../x@1", "bot@1@2"])
def test_a_sampler_without_a_version_is_refused(http: httpx.Client, sampler: str) -> None:
    error = refusal(http.post("/v1/train/grpo", json=sampled_by(None, sampler)))
    assert error["param"] == "groups[0].completions[1].adapter"


def test_rollouts_of_an_unknown_or_deleted_version_are_refused(running: Running, http: httpx.Client) -> None:
    publish(running, "bot")
    assert http.post("/v1/train/grpo", json=sampled_by("bot@1", "base")).status_code == 202
    remember(running, "c:0", [1, 2], [3])
    remember(running, "c:1", [1, 2], [4])
    by_id = {"adapter": "other", "rollouts": [{"completion_id": f"c:{n}", "reward": n} for n in range(2)]}
    assert http.post("/v1/train/grpo", json=by_id).status_code == 202
    for unknown in ("bot@2", "ghost@1"):
        error = refusal(http.post("/v1/train/grpo", json=sampled_by("bot@1", "base", unknown)), 404)
        assert error["param"] == "groups[0].completions[2].adapter"
        assert f"sampled by {unknown}, which was never published or is deleted" in error["message"]
    running.registry.delete("bot")
    for body in (sampled_by("bot@1", "base"), by_id):
        error = refusal(http.post("/v1/train/grpo", json=body), 404)
        assert error["param"] == "groups[0].completions[0].adapter"
        assert "leave `adapter` out" in error["message"]
    assert http.post("/v1/train/grpo", json=sampled_by(None, None)).status_code == 202


def test_rollouts_of_too_many_versions_are_refused(http: httpx.Client) -> None:
    error = refusal(http.post("/v1/train/grpo", json=sampled_by(*(f"bot@{number}" for number in range(1, 66)))))
    assert "by 65 adapter versions, over the limit of 64" in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"rewards": [1.0]}, "completions"),
        ({"rewards": [1e308, -1e308]}, "rewards[0]"),
        ({"adapter": MODEL}, "adapter"),
        ({"lora": {"rank": 17}}, "lora.rank"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"adapter": "../x"}, "adapter"),
        ({"kind": "sft"}, "kind"),
        ({"completions": ["4", "x" * 500]}, "completions[1]"),
        ({"start_from": "ghost"}, "start_from"),
    ],
)
def test_grpo_refused(http: httpx.Client, change: dict[str, Any], param: str | None) -> None:
    status = 404 if "start_from" in change else 400
    error = refusal(http.post("/v1/train/grpo", json=GRPO | change), status)
    assert error["param"] == param, error


def test_nan_reward(http: httpx.Client) -> None:
    for word in ("NaN", "1e999", '"NaN"'):
        body = json.dumps(GRPO | {"rewards": [1.0, "@"]}).replace('"@"', word)
        answer = http.post("/v1/train/grpo", content=body, headers={"content-type": "application/json"})
        assert "rewards" in refusal(answer)["message"]


def test_nan_inside_free_json(http: httpx.Client) -> None:
    body = json.dumps(SFT | {"chat_template_kwargs": {"x": ["@"]}}).replace('"@"', "NaN")
    answer = http.post("/v1/train/sft", content=body, headers={"content-type": "application/json"})
    assert refusal(answer)["param"] == "chat_template_kwargs"


def test_rates_that_agree_are_one(running: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/train/sft", json=SFT | {"learning_rate": 1e-3, "optimizer": {"learning_rate": 1e-3}})
    spec = running.queue.specs[answer.json()["id"]]
    assert SPEC.validate_json(spec_json(spec)) == spec
    answer = http.post("/v1/train/sft", json=SFT | {"learning_rate": 1e-3, "optimizer": {"schedule": "cosine"}})
    spec = running.queue.specs[answer.json()["id"]]
    assert SPEC.validate_json(spec_json(spec)).named_learning_rate == 1e-3  # type: ignore[union-attr]


def test_all_linear_layers_by_pefts_word(http: httpx.Client) -> None:
    for names in (
        "all-linear",
        ["all-linear"],
        ["All-Linear", "lm_head"],
        ["layers.3.self_attn.q_proj", "up_proj"],
        None,
    ):
        assert http.post("/v1/train/sft", json=SFT | {"lora": {"target_modules": names}}).status_code == 202, names


def test_a_teacher_that_is_the_start(running: Running, http: httpx.Client) -> None:
    """Unless a job in front of it may publish another start."""
    files = {"adapter_model.safetensors": b"", "adapter_config.json": b'{"r": 4}'}
    version = running.registry.publish("pupil", files, base_digest="").ref
    body = OPD | {"adapter": "pupil", "teacher": str(version)}
    for more in ({}, {"start_from": "pupil"}, {"start_from": str(version)}):
        assert refusal(http.post("/v1/train/opd", json=body | more))["param"] == "teacher"
    assert http.post("/v1/train/opd", json=body | {"start_from": "base"}).status_code == 202
    assert http.post("/v1/train/opd", json=body).status_code == 202  # behind the other
    assert refusal(http.post("/v1/train/opd", json=body | {"start_from": str(version)}))["param"] == "teacher"


def test_overlong_policies(http: httpx.Client) -> None:
    examples = [*SFT["examples"], {"prompt": "x", "completion": "y" * 400}]
    for policy in ("drop", "truncate"):
        assert http.post("/v1/train/sft", json=SFT | {"examples": examples, "overlong": policy}).status_code == 202


def test_idempotency(http: httpx.Client) -> None:
    headers = {"idempotency-key": "once"}
    first = http.post("/v1/train/sft", json=SFT, headers=headers).json()
    assert http.post("/v1/train/sft", json=SFT, headers=headers).json()["id"] == first["id"]
    assert http.post("/v1/train/sft", json=SFT | {"epochs": 9}, headers=headers).status_code == 409
    assert http.post("/v1/train/sft", json=SFT, headers={"idempotency-key": "x" * 300}).status_code == 400


def test_a_repeated_request_by_completion_ids_needs_no_memory(running: Running, http: httpx.Client) -> None:
    remember(running, "c:0", [1, 2], [3, 4])
    remember(running, "c:1", [1, 2], [5])
    headers = {"idempotency-key": "round-1"}
    body = {"adapter": "bot", "rollouts": [{"completion_id": f"c:{n}", "reward": n} for n in range(2)]}
    first = http.post("/v1/train/grpo", json=body, headers=headers)
    assert first.status_code == 202
    running.engine.rollouts.clear()
    again = http.post("/v1/train/grpo", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert again.headers["location"] == first.headers["location"]
    other = {**body, "rollouts": body["rollouts"][::-1]}
    assert http.post("/v1/train/grpo", json=other, headers=headers).status_code == 409
    assert http.post("/v1/train/grpo", json=body, headers={"idempotency-key": "round-2"}).status_code == 404


def _events(text: str) -> list[dict[str, str]]:
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]


def test_events(running: Running, http: httpx.Client) -> None:
    job = http.post("/v1/train/sft", json=SFT).json()
    threading.Timer(0.1, running.queue.finish, [job["id"]]).start()
    events = _events(http.get(f"/v1/train/jobs/{job['id']}/events").text)
    assert [(event["id"], event["event"]) for event in events] == [
        ("1-0", "state"),
        ("2-0", "progress"),
        ("3-0", "state"),
    ]
    assert json.loads(events[1]["data"])["data"]["loss"] == 0.5
    later = http.get(f"/v1/train/jobs/{job['id']}/events", headers={"last-event-id": "2-0"})
    assert [event["id"] for event in _events(later.text)] == ["3-0"]
    assert http.get(f"/v1/train/jobs/{job['id']}/events", headers={"last-event-id": "zz"}).status_code == 400


def test_a_signal_ends_readiness_and_the_closed_listener_followers(start: Starter) -> None:
    running = start()
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        job = http.post("/v1/train/sft", json=SFT).json()

        async def stop() -> None:
            await asyncio.sleep(0.2)
            running.lifecycle.stopping.set()
            await asyncio.sleep(0.2)
            running.lifecycle.closing.set()

        stopping = threading.Thread(target=running.run, args=(stop(),))
        stopping.start()
        events = _events(http.get(f"/v1/train/jobs/{job['id']}/events").text)
        stopping.join()
        assert [event["id"] for event in events] == ["1-0"]
        assert http.get("/readyz").status_code == 503
        assert http.get("/livez").status_code == 200


def test_a_page_behind_a_missing_job(http: httpx.Client, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(**_: Any) -> list[Any]:
        raise NotFound("no such job: 'ghost'", param="id")

    monkeypatch.setattr(running.queue, "list", missing)
    assert refusal(http.get("/v1/train/jobs", params={"after": "ghost"}), 404)["param"] == "after"


def test_missing_job(http: httpx.Client) -> None:
    for method, path in [("GET", ""), ("GET", "/events"), ("POST", "/cancel")]:
        assert http.request(method, f"/v1/train/jobs/ghost{path}").status_code == 404


def test_redis_away(running: Running, http: httpx.Client) -> None:
    running.queue.down = True
    for method, path in [("POST", "sft"), ("GET", "jobs"), ("GET", "jobs/x"), ("GET", "jobs/x/events")]:
        answer = http.request(method, f"/v1/train/{path}", json=SFT if method == "POST" else None)
        assert refusal(answer, 503)["code"] == "unavailable"
        assert "retry-after" in answer.headers
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert http.get("/readyz").status_code == 200
