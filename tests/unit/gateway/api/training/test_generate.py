"""Rollout jobs over HTTP: what is refused before anything waits in the queue."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.common.jobs import GrpoJob
from tests.unit.gateway.api.training.test_training import refusal
from tests.unit.gateway.conftest import Running

GENERATE: dict[str, Any] = {
    "prompts": ["2+2", {"messages": [{"role": "user", "content": "3+3"}], "answer": 6}, {"prompt_token_ids": [1, 2]}],
    "rounds": 2,
    "max_tokens": 8,
    "reward": {"type": "regex", "pattern": "4"},
}


def _playing(tools: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    """Fields of a job whose rollouts are episodes; ``fields`` are the environment's."""
    reward = {"type": "environment", "url": "http://127.0.0.1:9000", **fields}
    return {"prompts": [{"prompt": "{observation}", "tools": tools}], "reward": reward}


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/train/grpo", json={"adapter": "bot", "generate": GENERATE | fields})


def test_a_rollout_job_is_queued_as_it_was_sent(running: Running, http: httpx.Client) -> None:
    answer = post(http)
    assert answer.status_code == 202, answer.text
    spec = running.queue.specs[answer.json()["id"]]
    assert isinstance(spec, GrpoJob)
    assert spec == GrpoJob.model_validate({"adapter": "bot", "generate": GENERATE})
    assert spec.checkpoint_every == 1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompts": [{"prompt_token_ids": [10**9]}]}, "generate.prompts[0].prompt_token_ids", "vocabulary"),
        ({"stop_token_ids": [10**9]}, "generate.stop_token_ids", "vocabulary"),
        ({"max_tokens": 10**6}, "generate.prompts[0]", "max_tokens 1000000 over the"),
        ({"reward": {"type": "regex", "pattern": "("}}, "generate.reward[0].pattern", "RE2"),
        ({"reward": [{"type": "json_schema", "json_schema": {"type": "x"}}]}, "generate.reward[0].json_schema", "x"),
        (_playing(tools=[{"type": "function"}]), "generate.prompts[0].tools[0]", "give it a name"),
        (_playing(tools=[{"function": "look"}]), "generate.prompts[0].tools[0]", "give it a name"),
        (_playing(tools=[{"name": "look"}] * 2), "generate.prompts[0].tools[1]", "two tools have the name 'look'"),
        (_playing(tools=[{"name": "a", "parameters": []}]), "generate.prompts[0].tools[0].parameters", "an object"),
        (
            _playing(tools=[{"name": "a", "parameters": {"type": ["array", "null"]}}]),
            "generate.prompts[0].tools[0].parameters",
            "arguments are an object",
        ),
        (_playing(max_trajectory_tokens=6), "generate.prompts[0]", "which leaves no room for an answer"),
    ],
)
def test_what_can_never_succeed_is_refused(
    running: Running, http: httpx.Client, fields: dict[str, Any], param: str, says: str
) -> None:
    queued = len(running.queue.specs)
    error = refusal(post(http, **fields))
    assert error["param"] == param
    assert says in error["message"]
    assert len(running.queue.specs) == queued


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": {"type": "webhook", "url": "file:///etc/passwd"}},
        {"reward": {"type": "webhook", "url": "https://user:secret@host/"}},
        {"reward": {"type": "exact"}},
        {"completions": 1},
        {"top_k": 5},
    ],
)
def test_bad_shapes_are_refused(running: Running, http: httpx.Client, fields: dict[str, Any]) -> None:
    queued = len(running.queue.specs)
    assert 400 <= post(http, **fields).status_code < 500
    assert len(running.queue.specs) == queued


def test_numbers_that_json_does_not_have_are_refused(http: httpx.Client) -> None:
    prompt = {"prompt": "q", "tools": [{"name": "f", "parameters": {"x": float("nan")}}]}
    body = json.dumps({"adapter": "bot", "generate": GENERATE | {"eval_prompts": [prompt]}})
    answer = http.post("/v1/train/grpo", content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    prompts = [{"prompt": "{observation}", "reset": {"speed": float("inf")}}]
    body = json.dumps({"adapter": "bot", "generate": GENERATE | _playing() | {"prompts": prompts}})
    answer = http.post("/v1/train/grpo", content=body, headers={"content-type": "application/json"})
    assert refusal(answer)["param"] == "generate.prompts[0].reset"


def test_generate_goes_with_nothing_else(http: httpx.Client) -> None:
    body = {"adapter": "bot", "generate": GENERATE, "prompt": "2+2", "completions": ["4", "5"], "rewards": [1, 0]}
    answer = http.post("/v1/train/grpo", json=body)
    assert 400 <= answer.status_code < 500
    assert "exactly one of" in answer.text
