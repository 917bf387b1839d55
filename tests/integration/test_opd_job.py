"""A distillation job from the queue to the published version: real Redis, real S3, the tiny model's engine in this
process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.jobs import JobState, OpdJob
from services.common.queue.job_queue import JobQueue
from services.trainer.jobs import prepare_run
from tests.integration.beside_engine import Start, events, pod, start, until
from tests.integration.test_rollout_job import sampling, trainer_fields
from tests.rollout_support import TINY, Pod
from tests.training_support import TrainingHost, random_adapter

__all__ = ["pod", "start", "trainer_fields"]


@pytest.fixture
def tutor(pod: Pod, registry: AdapterRegistry) -> str:
    files = random_adapter(TrainingHost(TINY), scale=0.3)
    return str(registry.publish("tutor", files, base_digest=pod.engine.base_digest).ref)


def job(teacher: str, **fields: Any) -> OpdJob:
    return OpdJob.model_validate(
        {
            "adapter": "student",
            "teacher": teacher,
            "prompts": [f"Say {n}" for n in range(4)],
            "rounds": 6,
            "prompts_per_round": 3,
            "prompts_per_step": 2,
            "max_tokens": 10,
            "learning_rate": 0.001,
            "lora": {"rank": 4, "alpha": 4},
            "beta": 0.5,
            "eval_prompts": [f"Say {n}" for n in range(4)],
        }
        | fields
    )


def undisturbed(pod: Pod, spec: OpdJob) -> bytes:
    run = prepare_run(spec, pod.host, None)
    for index in range(run.total_steps):
        run.step(index)
    return run.lora.to_files("")[WEIGHTS]


async def test_from_submit_to_a_version(
    queue: JobQueue,
    registry: AdapterRegistry,
    start: Start,
    pod: Pod,
    tutor: str,
) -> None:
    start()
    spec = job(tutor, publish_if={"metric": "eval_divergence", "min_gain": 0.005})
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "student@1"), done.reason
    assert done.progress.step == done.progress.total_steps == 12
    assert done.metrics["eval_divergence"] < done.metrics["eval_divergence_before"]
    found = await events(queue, done.id)
    assert [event.data["step"] for event in found if event.kind == "eval"] == [0, 1, 12]
    assert pod.slots_taken() == 0
    weights = registry.files(AdapterVersion("student", 1))[WEIGHTS]
    assert weights == await asyncio.to_thread(undisturbed, pod, spec)


@pytest.mark.thorough
async def test_what_did_not_come_nearer_is_not_published(
    queue: JobQueue,
    registry: AdapterRegistry,
    start: Start,
    tutor: str,
) -> None:
    start()
    spec = job(tutor, publish_if={"metric": "eval_divergence", "min_gain": 1e6})
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert done.state is JobState.FAILED
    assert "eval_divergence was" in (done.reason or "")
    assert registry.versions("student") == []


@pytest.mark.thorough
async def test_drained_in_the_middle_it_ends_as_if_it_had_not_been(
    queue: JobQueue,
    registry: AdapterRegistry,
    start: Start,
    pod: Pod,
    tutor: str,
) -> None:
    spec = job(tutor, rounds=3, max_tokens=40, sampling_temperature=30)
    first = start()
    submitted = await queue.submit(spec)
    await until(queue, submitted.id, lambda job: job.progress.step >= 3)
    await sampling(pod)
    assert await asyncio.to_thread(first.drain)
    assert (await queue.get(submitted.id)).state is JobState.QUEUED
    await asyncio.to_thread(pod.settle)
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert any("resumed after step" in str(event.data) for event in await events(queue, done.id))
    weights = registry.files(AdapterVersion("student", 1))[WEIGHTS]
    assert weights == await asyncio.to_thread(undisturbed, pod, spec)


async def test_a_teacher_that_is_gone_or_foreign_fails_the_job_at_once(
    queue: JobQueue,
    registry: AdapterRegistry,
    start: Start,
    tutor: str,
) -> None:
    foreign = registry.publish("foreign", random_adapter(TrainingHost(TINY)), base_digest="another")
    registry.delete("tutor")
    start()
    for teacher, says in ((tutor, "teacher: adapter version tutor@1 does not exist"), (str(foreign.ref), "another")):
        done = await until(queue, (await queue.submit(job(teacher))).id, lambda job: job.state.terminal)
        assert (done.state, done.attempts) == (JobState.FAILED, 1)
        assert (done.reason or "").startswith("teacher: ")
        assert says in (done.reason or "")
