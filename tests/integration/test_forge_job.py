"""A forge job from the queue to its checkpoint: real Redis, real S3, the tiny model's engine in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import ForgeJob, Job, JobState
from services.common.queue.job_queue import JobQueue
from services.common.security.signature import check_signature
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.settings import EngineSettings
from services.pod.forging.job import PodForge
from tests.forked import pod_worker
from tests.integration.beside_engine import Start, events, pod, start, until
from tests.integration.test_evaluation_job import made
from tests.integration.worker_jobs import RECLAIM, Spawn, spawn, trainer_settings
from tests.rollout_support import TINY, Pod

__all__ = ["pod", "spawn", "start", "trainer_settings"]

RECOVER = {"method": "distill", "steps": 2, "batch_tokens": 16, "held_out_share": 0.3}
KEY = Ed25519PrivateKey.generate()
SUMS = 70
"""Items of the suite: more than a shard has."""
EXAMPLES = [{"prompt": f"What is {n} plus 4?", "completion": str(n + 4)} for n in range(6)]


@pytest.fixture
def trainer_fields() -> dict[str, Any]:
    return {"job_reclaim_seconds": RECLAIM}


@pytest.fixture
def forge(settings: CommonSettings, store: ObjectStore, pod: Pod, tmp_path: Path) -> PodForge:
    served = EngineSettings.model_validate({"model": TINY, "s3_bucket": settings.s3_bucket})
    return PodForge(served, pod.host, store, tmp_path / "forge", KEY)


@pytest.fixture
def suites(store: ObjectStore) -> SuiteStore:
    suites = SuiteStore(store)
    lines = [{"prompt": f"What is {n} plus {n + 1}?", "expected": str(2 * n + 1)} for n in range(SUMS)]
    made(suites, "sums", lines, scorer={"type": "exact"}, sampling={"max_tokens": 4})
    return suites


def job(**fields: Any) -> ForgeJob:
    return ForgeJob.model_validate({"prune": {"mlp_channels": "25%"}, "examples": EXAMPLES, **fields})


async def ended(queue: JobQueue, spec: ForgeJob) -> Job:
    return await until(queue, (await queue.submit(spec, key_id="ci")).id, lambda job: job.state.terminal)


async def test_killed_and_handed_on_a_job_goes_on_beside_traffic_and_ends_in_the_store(
    queue: JobQueue,
    store: ObjectStore,
    suites: SuiteStore,
    start: Start,
    spawn: Spawn,
    pod: Pod,
    tmp_path: Path,
) -> None:
    """Its first process is killed with -9 in the middle of the baseline's answers, or soon after them."""
    submitted = await queue.submit(job(suites=["sums@1"], name="Small", recover=RECOVER))
    killed = spawn(pod_worker, TEMPER_FORGE_DIR=str(tmp_path / "forge"))
    await until(queue, submitted.id, lambda job: job.progress.step >= 1)
    killed.kill()
    killed.wait()

    user = pod.user()
    asked = user.submit((3, 17, 250), max_tokens=200)
    first = start()
    await until(queue, submitted.id, lambda job: job.progress.step >= 2)
    assert await asyncio.to_thread(first.drain)
    kept = {path.name for path in (tmp_path / "forge").iterdir()}
    assert any(name.startswith("baseline-") for name in kept)
    start()
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert len(user.answer(asked)) == 200
    told = await events(queue, done.id)
    stages = [str(event.data["message"]) for event in told if event.kind == "log"]
    assert sum(stage == "baseline: answering" for stage in stages) == 1, "it was done once"
    (result,) = [event.data for event in told if event.kind == "published"]
    record = json.loads(store.get(f"forged/{done.id}/forge.json").data)
    assert result["model"].endswith(f"/forged/{done.id}")
    assert result["digest"] == record["outputs"]["digest"]
    assert record["base"]["digest"] == pod.host.base_digest
    assert record["plan"]["shape"] == {"mlp_channels": [512, 384]}
    assert [stage["step"] for stage in record["stages"]] == ["compact", "recover"]
    assert record["stages"][1]["recipe"]["teacher"] == {"name": "tiny", "digest": pod.host.base_digest}
    assert record["evaluation"]["before"]["sums@1"]["items"] == SUMS
    names = {key.rpartition("/")[2] for key in store.list(f"forged/{done.id}/")}
    assert names == {*record["outputs"]["files"], "forge.json", "forge.json.sig"}
    record_and_signature = (store.get(f"forged/{done.id}/{name}").data for name in ("forge.json", "forge.json.sig"))
    check_signature(*record_and_signature, KEY.public_key())
    assert (done.progress.step, done.progress.total_steps) == (7, 7)
    assert store.get(f"forged/{done.id}/README.md").data.startswith(b"# Small\n")
    left = {path.name.partition("-")[0] for path in (tmp_path / "forge").iterdir()}
    assert left <= {".lock", "no"}, "what stages made is gone"


async def test_what_cannot_be_forged_is_told_and_the_next_job_runs(
    queue: JobQueue, suites: SuiteStore, start: Start, pod: Pod
) -> None:
    worker = start()
    impossible = await ended(queue, job(prune={"kv_groups": "25%"}))
    assert impossible.state is JobState.FAILED
    assert "kv_groups: 25% of 2 cannot go; possible are 1" in (impossible.reason or "")
    missing = await ended(queue, job(suites=["nothing@3"]))
    assert "suites[0]: suite version nothing@3 does not exist" in (missing.reason or "")
    submitted = await queue.submit(job(suites=["sums@1"]))
    await until(queue, submitted.id, lambda job: job.progress.total_steps > 0)
    suites.delete(suites.get("sums").ref)
    deleted = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert (deleted.state, deleted.attempts) == (JobState.FAILED, 1)
    assert "suite version sums@1 does not exist" in (deleted.reason or "")
    assert worker.alive


async def test_a_job_is_cancelled_in_the_middle(queue: JobQueue, suites: SuiteStore, start: Start, pod: Pod) -> None:
    start()
    submitted = await queue.submit(job(importance={"method": "leave_one_out", "sample_tokens": 64}))
    await until(queue, submitted.id, lambda job: job.progress.total_steps > 0)
    await queue.cancel(submitted.id)
    done = await until(queue, submitted.id, lambda job: job.state.terminal)
    assert done.state is JobState.CANCELLED
    assert done.progress.step < done.progress.total_steps
