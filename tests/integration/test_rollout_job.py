"""A rollout job from the queue to the engine: real Redis, real S3, the tiny model's engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.jobs import GrpoJob, JobEvent, JobState
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Grants
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from services.engine.requests.adapter import AdapterChoice
from services.trainer.jobs import prepare_run
from tests.forked import pod_worker
from tests.integration.beside_engine import Start, events, pod, start, until
from tests.integration.worker_jobs import Spawn, spawn, trainer_settings
from tests.rollout_support import Pod, running_pod, wait_for
from tests.unit.common.jobs.scorers.test_webhook import SECRET, ok, serving

__all__ = ["pod", "spawn", "start", "trainer_settings"]

QUICK = {
    "prompts": [f"Say {n}" for n in range(4)],
    "rounds": 3,
    "prompts_per_round": 2,
    "completions": 4,
    "max_tokens": 10,
    "temperature": 3.0,
    "reward": [{"type": "regex", "pattern": p} for p in ("e", "a", "[0-9]", "T")],
}
LONG = {**QUICK, "max_tokens": 200, "completions": 32, "temperature": 30.0}
"""Seconds of sampling a round."""


def job(adapter: str = "toy", **generate: Any) -> GrpoJob:
    return GrpoJob.model_validate(
        {"adapter": adapter, "learning_rate": 0.01, "lora": {"rank": 4}, "generate": QUICK | generate}
    )


@pytest.fixture
def trainer_fields() -> dict[str, Any]:
    return {"trainer_drain_seconds": 10, "adapter_sync_seconds": 5, "job_max_attempts": 2}


async def everything_said(queue: JobQueue, job_id: str) -> list[JobEvent]:
    """So far, of a job that has not ended."""
    found: list[JobEvent] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            async for event in queue.events(job_id):
                found.append(event)
    return found


def undisturbed(pod: Pod, spec: GrpoJob) -> bytes:
    run = prepare_run(spec, pod.host, None)
    for index in range(run.total_steps):
        run.step(index)
    return run.lora.to_files("")[WEIGHTS]


async def sampling(pod: Pod) -> None:
    await asyncio.to_thread(wait_for, lambda: pod.engine.loop.status().counts.running > 0)


async def test_from_submit_to_the_next_request(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod
) -> None:
    start()
    spec = job(eval_prompts=["Say 9"], eval_every=1)
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "toy@1"), done.reason
    assert done.progress.step == done.progress.total_steps == 3
    assert {"reward_mean", "eval_reward", "eval_reward_before", "sampler_trainer_kl"} <= done.metrics.keys()
    found = await events(queue, done.id)
    rewards = [event.data["reward_mean"] for event in found if event.kind == "progress" and "round" in event.data]
    assert len(rewards) == 3
    assert [event.data["step"] for event in found if event.kind == "eval"] == [1, 2, 3]
    assert pod.slots_taken() == 0
    # What was published is what trained, and is what answers now.
    weights = registry.files(AdapterVersion("toy", 1))[WEIGHTS]
    assert weights == await asyncio.to_thread(undisturbed, pod, spec)
    assert pod.engine.adapters.snapshot().attached == "toy@1"
    user = pod.user()
    name = user.submit(tuple(pod.engine.codec.encode("Say 3")), adapter=AdapterChoice(attached=True))
    assert await asyncio.to_thread(user.answer, name)
    assert registry.versions("toy") == [registry.manifest(AdapterVersion("toy", 1))]


async def test_cancelling_in_the_middle_of_a_rollout(queue: JobQueue, start: Start, pod: Pod) -> None:
    start()
    # A round of minutes, where CI computes.
    submitted = await queue.submit(job(**LONG | {"prompts_per_round": 4, "completions": 64}))
    await sampling(pod)
    began = time.monotonic()
    await queue.cancel(submitted.id)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.CANCELLED
    assert time.monotonic() - began < 20
    await asyncio.to_thread(pod.settle)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("staleness", [0, 1])
async def test_draining_in_the_middle_of_a_rollout(
    queue: JobQueue, registry: AdapterRegistry, start: Start, pod: Pod, staleness: int
) -> None:
    """The job is handed back, not failed; another trainer ends it with the adapter of an undisturbed run."""
    spec = job(**{**LONG, "completions": 4, "max_tokens": 40, "staleness": staleness})
    first = start()
    submitted = await queue.submit(spec)
    await until(queue, submitted.id, lambda job: job.progress.step >= 1)
    await sampling(pod)
    assert await asyncio.to_thread(first.drain)
    handed_back = await queue.get(submitted.id)
    assert handed_back.state is JobState.QUEUED
    await asyncio.to_thread(pod.settle)
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert any("resumed after step" in str(event.data) for event in await events(queue, done.id))
    weights = registry.files(AdapterVersion("toy", 1))[WEIGHTS]
    assert weights == await asyncio.to_thread(undisturbed, pod, spec)


async def test_an_engine_that_drains_first_costs_the_job_no_attempt(queue: JobQueue, start: Start, pod: Pod) -> None:
    worker = start()
    submitted = await queue.submit(job(**LONG))
    await sampling(pod)
    worker.stop_soon()
    pod.engine.loop.drain(0.0)
    assert await asyncio.to_thread(worker.drain)
    handed_back = await queue.get(submitted.id)
    assert handed_back.state is JobState.QUEUED
    assert handed_back.reason is None
    said = [event.data for event in await everything_said(queue, submitted.id)]
    assert not any("refused" in str(data) or "Unavailable" in str(data) for data in said)
    await asyncio.to_thread(wait_for, lambda: pod.slots_taken() == 0)


async def test_a_webhook_that_fails_fails_the_job(queue: JobQueue, store: ObjectStore, start: Start, pod: Pod) -> None:
    calls = 0

    def answer(seen: Any) -> Any:
        nonlocal calls
        calls += 1
        return ok([float(n % 3) for n in range(8)]) if calls == 1 else (500, {}, b"broken")

    with serving(answer) as server:
        start(grants=Grants(Webhooks(allowed=(server.url,), secret=SECRET, attempts=2)))
        spec = job(reward={"type": "webhook", "url": server.url})
        done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert done.state is JobState.FAILED
    assert "given up after 2 attempts" in (done.reason or "")
    assert f"the webhook {server.url} failed 2 times, the last time because it answered with status 500" in (
        done.reason or ""
    )
    assert calls == 1 + 2 * 2, "the first round was not sampled again"
    await asyncio.to_thread(wait_for, lambda: not store.list(f"jobs/{done.id}/checkpoints/"))
    assert done.metrics["reward_mean"] == pytest.approx(7 / 8)


async def test_a_webhook_that_is_not_listed_fails_at_once(queue: JobQueue, start: Start, pod: Pod) -> None:
    start()
    spec = job(reward={"type": "webhook", "url": "http://169.254.169.254/latest"})
    done = await until(queue, (await queue.submit(spec)).id, lambda job: job.state.terminal)
    assert (done.state, done.attempts) == (JobState.FAILED, 1)
    assert "not covered by TEMPER_REWARD_WEBHOOKS" in (done.reason or "")


async def test_kill_nine_while_a_round_is_sampled_ahead(
    queue: JobQueue, registry: AdapterRegistry, spawn: Spawn
) -> None:
    """Twice, each time with the next round under way and groups that wait for it: a third process ends the job with the
    weights of an undisturbed one."""
    spec = job(rounds=5, completions=8, max_tokens=40, staleness=1, cut={"fraction": 0.5})
    submitted = await queue.submit(spec)
    for step in (2, 3):
        process = spawn(pod_worker)
        await until(queue, submitted.id, lambda job, step=step: job.progress.step >= step)  # type: ignore[misc]
        process.kill()
        process.wait()
        assert (await queue.get(submitted.id)).state is JobState.RUNNING
    spawn(pod_worker)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert (done.state, done.attempts, done.result_adapter) == (JobState.SUCCEEDED, 3, "toy@1"), done.reason
    resumed = [event.data["message"] for event in await events(queue, done.id) if "resumed" in str(event.data)]
    assert resumed
    assert "after step 0 " not in resumed[-1]
    assert any("rollouts were cut by generate.cut" in note for note in done.notes)
    weights = registry.files(AdapterVersion("toy", 1))[WEIGHTS]
    with running_pod() as alone:
        assert weights == await asyncio.to_thread(undisturbed, alone, spec)
