"""Fine-tuning jobs against the whole system, through the real openai client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from tests.stack import PATIENCE, Stack


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def upload(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    content = "\n".join(json.dumps(row) for row in rows).encode()
    return client.files.create(file=("data.jsonl", content), purpose="fine-tune").id


def until(client: openai.OpenAI, job_id: str, holds: Callable[[FineTuningJob], bool]) -> FineTuningJob:
    deadline = time.monotonic() + PATIENCE
    while not holds(job := client.fine_tuning.jobs.retrieve(job_id)):
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def test_a_supervised_job_from_its_file_to_answers(client: openai.OpenAI, stack: Stack) -> None:
    turns = [{"role": "user", "content": "Say the secret word."}, {"role": "assistant", "content": "7"}]
    file = upload(client, [{"messages": turns}] * 4)
    job = client.fine_tuning.jobs.create(
        model=stack.served_model_name,
        training_file=file,
        validation_file=file,
        suffix="secret",
        seed=1,
        metadata={"test": "conformance"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 20, "batch_size": 1}}},
    )
    assert job.fine_tuned_model is None
    client.fine_tuning.jobs.pause(job.id)
    until(client, job.id, lambda job: job.status == "paused")  # type: ignore[comparison-overlap]
    client.fine_tuning.jobs.resume(job.id)
    done = until(client, job.id, lambda job: job.status in ("succeeded", "failed"))
    assert (done.status, done.error) == ("succeeded", None)
    assert done.trained_tokens is not None
    assert done.trained_tokens > 0
    assert done.fine_tuned_model is not None
    answer = client.chat.completions.create(model=done.fine_tuned_model, messages=[turns[0]], max_tokens=4)  # type: ignore[list-item]
    assert answer.model == done.fine_tuned_model
    base = client.chat.completions.create(model=stack.served_model_name, messages=[turns[0]], max_tokens=4)  # type: ignore[list-item]
    assert base.model == stack.served_model_name, "nothing else answers with the result"
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=30))
    steps = [event.data for event in events if event.type == "metrics" and "train_loss" in (event.data or {})]  # type: ignore[operator]
    assert [step["step"] for step in steps] == list(range(80, 0, -1))  # type: ignore[index]
    assert any(event.message == f"New fine-tuned model created: {done.fine_tuned_model}" for event in events)
    assert any("full_valid_loss" in (event.data or {}) for event in events)  # type: ignore[operator]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=2))
    assert [one.step_number for one in checkpoints] == [80, 76, 72], "the ends of the last epochs"
    assert checkpoints[0].fine_tuned_model_checkpoint == done.fine_tuned_model
    for one in checkpoints:
        assert one.fine_tuning_job_id == job.id
        assert None not in (one.metrics.step, one.metrics.train_loss, one.metrics.full_valid_loss)
        name = one.fine_tuned_model_checkpoint
        said = client.chat.completions.create(model=name, messages=[turns[0]], max_tokens=4)  # type: ignore[list-item]
        assert said.model == name
    name = str(done.fine_tuned_model).partition("@")[0]
    client.delete(f"/adapters/{name}", cast_to=object)
    assert list(client.fine_tuning.jobs.checkpoints.list(job.id)) == [], "what is deleted answers no more"
    mine = client.fine_tuning.jobs.list(limit=1, metadata={"test": "conformance"})
    assert [one.id for one in mine.data] == [job.id]


@pytest.mark.thorough
def test_reinforcement_by_a_grader(client: openai.OpenAI, stack: Stack) -> None:
    rows = [{"messages": [{"role": "user", "content": f"What is {n} plus 7?"}], "sum": n + 7} for n in (1, 2)]
    job = client.fine_tuning.jobs.create(
        model=stack.served_model_name,
        training_file=upload(client, rows),
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": {
                    "type": "string_check",
                    "name": "sum",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.sum}}",
                    "operation": "like",
                },
                "hyperparameters": {"n_epochs": 1, "compute_multiplier": 0.25},
            },
        },
    )
    done = until(client, job.id, lambda job: job.status in ("succeeded", "failed"))
    assert done.status == "succeeded", done.error
    rewards = [event.data for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    assert any("reward_mean" in (reward or {}) for reward in rewards)  # type: ignore[operator]


def test_a_bad_line_is_told_and_a_job_is_cancelled(client: openai.OpenAI, stack: Stack) -> None:
    pair = {
        "input": {"messages": [{"role": "user", "content": "1+1"}]},
        "preferred_output": [{"role": "assistant", "content": "2"}],
        "non_preferred_output": [{"role": "assistant", "content": "3"}],
    }
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3}}}
    bad = upload(client, [pair, {**pair, "preferred_output": []}])
    with pytest.raises(openai.BadRequestError, match="training_file: line 2") as refused:
        client.fine_tuning.jobs.create(model=stack.served_model_name, training_file=bad, method=method)
    assert refused.value.param == "training_file"
    file = upload(client, [pair] * 40)
    job = client.fine_tuning.jobs.create(model=stack.served_model_name, training_file=file, method=method)
    client.fine_tuning.jobs.cancel(job.id)
    assert until(client, job.id, lambda job: job.status == "cancelled").fine_tuned_model is None
    assert any("cancelled" in event.message for event in client.fine_tuning.jobs.list_events(job.id))
