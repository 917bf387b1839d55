"""Gates that are decided while their process is killed, again and again: kill -9 of a real process with the tiny
model's engine, real Redis, real S3."""

from __future__ import annotations

from pathlib import Path

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.runs.records import CANDIDATE
from services.common.evaluation.runs.store import SHARD_ITEMS, EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import JobState
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from tests.forked import pod_worker
from tests.integration.test_suite_gates import MANY, SUMS, job, suites
from tests.integration.worker_jobs import Spawn, events_of, finished, spawn, trainer_settings, until

__all__ = ["spawn", "suites", "trainer_settings"]


async def test_kill_nine_while_a_gate_is_decided(
    queue: JobQueue, store: ObjectStore, registry: AdapterRegistry, suites: SuiteStore, spawn: Spawn, tmp_path: Path
) -> None:
    """Killed in the middle of the answers, and then with the decision written and the version not yet: published once,
    with the evidence of one run. Likewise what a gate does not let pass is refused once."""
    runs, deaths = EvaluationStore(store), tmp_path / "deaths"
    deaths.mkdir()
    good = await queue.submit(job(epochs=1, publish_if={"no_loss": [{"suite": "many", "max_loss": 0.99}]}))
    process = spawn(pod_worker)
    await until(queue, good.id, lambda job: job.metrics.get("gate_items_done", 0) >= MANY + SHARD_ITEMS)
    process.kill()
    process.wait()
    (run,) = runs.all.newest()
    kept = runs.shard(run, 0, 1, 0)
    assert kept is not None
    assert (runs.result(run), registry.names()) == (None, [])

    spawn(pod_worker, TEMPER_DEATHS=str(deaths)).wait()
    assert [one.name for one in deaths.iterdir()] == [run], "the same run, gone on with"
    (decided,) = runs.gates(run)
    assert (decided.passed, registry.names()) == (True, [])

    # Parrots: they have forgotten their sums.
    bad = await queue.submit(job(adapter="parrot", publish_if={"no_loss": [{"suite": "sums", "max_loss": 0.05}]}))
    # It dies of the other job's decision, which comes first where that job is free before this one's claim has run out.
    spawn(pod_worker, TEMPER_DEATHS=str(deaths)).wait()
    spawn(pod_worker, TEMPER_DEATHS=str(deaths))
    done = await finished(queue, good.id)
    assert (done.state, done.attempts, done.result_adapter) == (JobState.SUCCEEDED, 3, "fruit@1"), done.reason
    assert [one.version for one in registry.versions("fruit")] == [1]
    manifest = registry.manifest(AdapterVersion("fruit", 1))
    assert (manifest.gates, done.evaluation) == ((decided,), run)
    assert (decided.candidate, decided.evaluation) == (manifest.digest, run)
    assert runs.shard(run, 0, 1, 0) == kept, "nothing was asked again"
    assert runs.of_version(manifest.ref).newest() == [run]

    refused = await finished(queue, bad.id)
    assert (refused.state, refused.attempts, refused.result_adapter) == (JobState.FAILED, 2, None), refused.reason
    assert "publish_if is not met against base: sums@1" in (refused.reason or "")
    ends = [event.data["state"] for event in await events_of(queue, bad.id) if event.kind == "state"]
    assert ends.count("failed") == 1
    assert registry.names() == ["fruit"]
    assert refused.evaluation is not None
    (evidence,) = runs.gates(refused.evaluation)
    assert (evidence.passed, evidence.conditions[0].items) == (False, SUMS)
    record = runs.record(refused.evaluation)
    assert record is not None
    assert [target.name for target in record.targets] == ["base", CANDIDATE]
    assert (
        sorted(runs.all.newest()) == sorted([run, refused.evaluation]) == sorted(one.name for one in deaths.iterdir())
    )
