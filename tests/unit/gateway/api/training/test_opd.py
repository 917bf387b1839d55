"""Distillation jobs over HTTP: what is refused before anything waits in the queue."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.jobs import OpdJob
from tests.unit.gateway.api.training.test_training import refusal
from tests.unit.gateway.conftest import Running

JOB: dict[str, Any] = {
    "adapter": "student",
    "prompts": ["2+2", {"messages": [{"role": "user", "content": "3+3"}]}, {"prompt_token_ids": [1, 2]}],
    "teacher": "base",
    "rounds": 2,
    "max_tokens": 8,
}


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/train/opd", json=JOB | fields)


def test_a_job_is_queued_as_it_was_sent(running: Running, http: httpx.Client) -> None:
    files = {"adapter_model.safetensors": b"", "adapter_config.json": b'{"r": 4}'}
    version = running.registry.publish("tutor", files, base_digest="")
    answer = post(http, teacher=str(version.ref))
    assert answer.status_code == 202, answer.text
    assert answer.json()["kind"] == "opd"
    assert running.queue.specs[answer.json()["id"]] == OpdJob.model_validate(JOB | {"teacher": "tutor@1"})


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"beta": 1.5}, "beta", "less than or equal to 1"),
        ({"lmbda": 0.5}, None, "prompts[0] has none"),
        ({"teacher": "bot"}, "teacher", "name the version"),
        ({"teacher": "checkpoint"}, "teacher", "TEMPER_TEACHER_MODEL"),
        ({"prompts": [{"prompt_token_ids": [10**9]}]}, "prompts[0].prompt_token_ids", "vocabulary"),
        (
            {"eval_prompts": [{"prompt": "x", "completion_token_ids": [10**9]}]},
            "eval_prompts[0].completion_token_ids",
            "vocabulary",
        ),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "vocabulary"),
        ({"max_tokens": 10**6}, "prompts[0]", "max_tokens 1000000 over the"),
        ({"eval_prompts": [{"prompt": "x", "completion": "word " * 10**5}]}, "eval_prompts[0]", "limit for training"),
    ],
)
def test_what_can_never_succeed_is_refused(
    running: Running, http: httpx.Client, fields: dict[str, Any], param: str | None, says: str
) -> None:
    queued = len(running.queue.specs)
    error = refusal(post(http, **fields))
    if param is not None:
        assert error["param"] == param
    assert says in error["message"]
    assert len(running.queue.specs) == queued


@pytest.mark.parametrize("teacher", ["tutor@99", "ghost@1", "tutor@1*0.5+ghost@1"])
def test_an_unknown_version_is_refused(running: Running, http: httpx.Client, teacher: str) -> None:
    error = refusal(post(http, teacher=teacher), status=404)
    assert error["param"] == "teacher"
    assert teacher.rpartition("+")[2] in error["message"]


def test_a_second_checkpoint_may_teach_where_there_is_one(running: Running, http: httpx.Client) -> None:
    running.inference.engines.served.info.teacher = "digest"
    assert post(http, teacher="checkpoint").status_code == 202
