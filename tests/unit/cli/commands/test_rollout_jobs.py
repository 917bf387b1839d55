"""Rollout jobs on the command line: a job file goes in, the rounds' rewards come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.cli.runner import JOB, routes, state, temper
from tests.unit.cli.server import Reply, serving, sse

GENERATE: dict[str, Any] = {
    "prompts": [{"prompt": "2+2=", "answer": 4}],
    "rounds": 3,
    "max_tokens": 8,
    "reward": {"type": "numeric"},
}


def test_a_job_file_with_generate(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"kind": "grpo", "adapter": "sums", "generate": GENERATE}))
    with serving(routes(POST_v1_train_grpo=Reply(JOB, 202))) as (url, requests):
        result = temper("train", "submit", str(file), "--set", "generate.rounds=5", url=url)
    assert result.exit_code == 0, result.stderr
    assert requests[0].json == {"adapter": "sums", "generate": GENERATE | {"rounds": 5}}


def test_a_bad_rollout_job_is_refused_here(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"kind": "grpo", "adapter": "sums", "generate": GENERATE | {"completions": 1}}))
    result = temper("train", "submit", str(file), url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "generate.completions" in result.stderr


def test_watch_shows_each_rounds_reward() -> None:
    def progress(step: int, **metrics: float) -> dict[str, Any]:
        return {"kind": "progress", "data": {"step": step, "total_steps": 2, **metrics}}

    stream = sse(
        ("1-0", "state", state("running")),
        ("2-0", "progress", progress(1, round=1.0, reward_mean=0.25, rollout_seconds=1.0)),
        ("3-0", "progress", progress(2, round=2.0, reward_mean=0.5, eval_reward=0.75)),
        ("4-0", "state", state("succeeded")),
    )
    answer = routes(GET_v1_train_jobs_job1_events=stream, GET_v1_train_jobs_job1=Reply(JOB))
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", url=url)
    assert result.exit_code == 0, result.stderr
    assert "step 1/2  round 1  reward_mean 0.25" in result.stderr
    assert "step 2/2  round 2  reward_mean 0.5  eval_reward 0.75" in result.stderr


def test_prompts_to_distil_on_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "2+2"}\n{"prompt_token_ids": [1, 2]}\n')
    options = ("--adapter", "a", "--set", "teacher=b@1", "--set", "rounds=2", "--set", "max_tokens=4")
    with serving(routes(POST_v1_train_opd=Reply(JOB, 202))) as (url, requests):
        result = temper("train", "submit", "opd", "--data", str(file), *options, url=url)
    assert result.exit_code == 0, result.stderr
    prompts = [{"prompt": "2+2"}, {"prompt_token_ids": [1, 2]}]
    assert requests[0].json == {"adapter": "a", "teacher": "b@1", "rounds": 2, "max_tokens": 4, "prompts": prompts}


def test_a_bad_prompt_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "2+2"}\n\n{"prompt": "x", "answer": "y"}\n')
    result = temper("train", "submit", "opd", "--data", str(file), "--adapter", "a", url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert f"{file}:3: prompts[1]: unknown field 'answer'" in result.stderr
