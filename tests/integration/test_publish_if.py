"""A job that must improve to be published: both ends of the condition, and through deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.jobs import JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.trainer.runtime.worker import TrainerWorker
from tests.integration.toy import ToyRun, expected
from tests.integration.worker_jobs import (
    Spawn,
    events_of,
    finished,
    spawn,
    trainer_settings,
    until,
    worker,
)

__all__ = ["spawn", "trainer_settings", "worker"]


def job(metric: str = "eval_loss", min_gain: float = 0.0, *, steps: int = 12, **fields: object) -> SftJob:
    examples = [{"prompt": "1+1", "completion": "2"}, {"prompt": "2+2", "completion": "4"}]
    metadata = {"steps": str(steps), "sleep": "0"} | dict(fields.pop("metadata", {}))  # type: ignore[call-overload]
    return SftJob.model_validate(
        {
            "adapter": "math",
            "examples": examples,
            "eval_fraction": 0.5,
            "checkpoint_every": 3,
            "publish_if": {"metric": metric, "min_gain": min_gain},
            "metadata": metadata,
            **fields,
        }
    )


def gain(spec: SftJob, metric: str, parent: dict[str, bytes] | None = None) -> float:
    """What an undisturbed run improves by."""
    run = ToyRun(spec, parent)
    before = run.evaluate()[metric]
    for index in range(run.total_steps):
        run.step(index, lambda: None)
    after = run.evaluate()[metric]
    return before - after if metric == "eval_loss" else after - before


@pytest.mark.parametrize("metric", ["eval_loss", "eval_token_accuracy"])
async def test_the_gain_decides(queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, metric: str) -> None:
    first = await finished(queue, (await queue.submit(job(metric, steps=2, publish_if=None))).id)
    assert first.state is JobState.SUCCEEDED
    parent = registry.files(AdapterVersion("math", 1))
    reached = gain(job(metric), metric, parent)
    assert reached > 0

    missed = await finished(queue, (await queue.submit(job(metric, reached * 1.01))).id)
    assert missed.state is JobState.FAILED
    assert missed.attempts == 1, "another attempt would not help"
    reason = missed.reason or ""
    assert f"{metric} was " in reason
    assert f"a gain of {reached:.6g}"[:16] in reason
    assert "math stays as it was" in reason
    assert registry.current("math") == AdapterVersion("math", 1) == registry.attached()
    assert [m.version for m in registry.versions("math")] == [1]
    evaluations = [event.data for event in await events_of(queue, missed.id) if event.kind == "eval"]
    assert [event["step"] for event in evaluations] == [0, 12], "both evaluations are to be seen"

    met = await finished(queue, (await queue.submit(job(metric, reached * 0.99))).id)
    assert (met.state, met.result_adapter) == (JobState.SUCCEEDED, "math@2")
    metrics = registry.manifest(AdapterVersion("math", 2)).metrics
    assert abs(metrics[f"start_{metric}"] - metrics[metric]) == pytest.approx(reached, rel=1e-4)


async def test_a_condition_survives_kill_nine(
    queue: JobQueue, registry: AdapterRegistry, spawn: Spawn, tmp_path: Path
) -> None:
    """The start is evaluated once: the resumed run, whose weights have moved, compares with the first process's."""
    log = tmp_path / "evaluations"
    steering = {"sleep": "0.1", "evaluations": str(log)}
    reached = gain(job(steps=18), "eval_loss")
    wanted = job(min_gain=reached * 0.99, steps=18, metadata=steering)
    submitted = await queue.submit(wanted)
    process = spawn()
    await until(queue, submitted.id, lambda j: j.progress.step >= 10)
    process.kill()
    process.wait()
    spawn()
    done = await finished(queue, submitted.id)
    assert (done.state, done.attempts) == (JobState.SUCCEEDED, 2), done.reason
    plain = wanted.model_copy(update={"metadata": {"steps": "18", "sleep": "0"}})
    assert registry.files(AdapterVersion("math", 1))[WEIGHTS] == expected(plain)[0]
    assert log.read_text().split() == ["0", "18"]


async def test_a_condition_that_fails_after_a_restart_publishes_nothing(
    queue: JobQueue, registry: AdapterRegistry, spawn: Spawn
) -> None:
    reached = gain(job(steps=18), "eval_loss")
    submitted = await queue.submit(job(min_gain=reached * 1.01, steps=18, metadata={"sleep": "0.1"}))
    process = spawn()
    await until(queue, submitted.id, lambda j: j.progress.step >= 8)
    process.kill()
    process.wait()
    spawn()
    done = await finished(queue, submitted.id)
    assert (done.state, done.attempts) == (JobState.FAILED, 2)
    assert "not published" in (done.reason or "")
    assert registry.names() == []


async def test_a_candidate_is_published_without_being_current(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker
) -> None:
    """Neither as an adapter's first version nor as a later one, whose numbers go on."""
    plain: dict[str, Any] = {"publish_if": None, "attach": False}
    tried = await finished(queue, (await queue.submit(job(steps=2, candidate=True, **plain))).id)
    assert (tried.state, tried.result_adapter) == (JobState.SUCCEEDED, "math@1")
    assert (registry.newest("math"), registry.names(), registry.attached()) == (0, [], None)
    await finished(queue, (await queue.submit(job(steps=2, **plain))).id)
    later = await finished(queue, (await queue.submit(job(steps=2, candidate=True, **plain))).id)
    assert later.result_adapter == "math@3"
    assert registry.current("math") == AdapterVersion("math", 2)
    assert registry.manifest(AdapterVersion("math", 3)).parent == "math@2"
    kept = prune(registry, "math", RetentionPolicy(keep=1)).kept
    assert kept == {2: "current", 3: "among the newest 1"}
    registry.publish("math", registry.files(AdapterVersion("math", 3)), base_digest="", current=False)
    assert prune(registry, "math", RetentionPolicy(keep=1), dry_run=True).kept[3] == "a candidate"
    with pytest.raises(ValidationError, match="attach: false"):
        job(publish_if=None, candidate=True)
