"""Small jobs that take their steps together, with a real queue, real stores and real deaths: each as if alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.jobs import Job, JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.models.lora.lora_batch import LoraBatch
from services.trainer.jobs import prepare_run
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.forked import ForkedProcess
from tests.forked import small_worker as small_process
from tests.integration.servers import RunningServer
from tests.integration.small_jobs import SmallHost, curve_of, small_job
from tests.integration.toy import make_worker
from tests.integration.worker_jobs import events_of, finished, loss_curve, until
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_host import TrainingHost
from tests.training_support import write_checkpoint

RECLAIM = 1.5
PAUSE = 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small weights: with larger ones a rounding grows a thousandfold in some steps, also of a job alone.
    return write_checkpoint(tmp_path_factory.mktemp("small"), qwen_like_tokenizer(), initializer_range=0.05)


@pytest.fixture
def trainer_settings(settings: CommonSettings, store: ObjectStore, tmp_path: Path) -> TrainerSettings:
    torch.set_num_threads(1)
    return TrainerSettings(
        **settings.model_dump(),
        job_reclaim_seconds=RECLAIM,
        job_heartbeat_seconds=0.2,
        checkpoint_dir=tmp_path / "checkpoints",
        trainer_drain_seconds=10,
    )


class Forwards:
    """Counts how many adapters each training forward had."""

    def __init__(self, host: TrainingHost) -> None:
        self.adapters: list[int] = []
        self._forward = host.model.forward_train
        self.fail = False
        host.model.forward_train = self

    def __call__(self, token_ids: Any, lengths: Any, lora: Any, **options: Any) -> torch.Tensor:
        self.adapters.append(len(lora.adapters) if isinstance(lora, LoraBatch) else 1)
        if self.fail and self.adapters[-1] > 1:
            raise RuntimeError("a kernel for several adapters is broken")
        return self._forward(token_ids, lengths, lora, **options)


Start = Callable[..., TrainerWorker]


@pytest.fixture
def start(trainer_settings: TrainerSettings) -> Iterator[Start]:
    """Starts a worker."""
    workers: list[TrainerWorker] = []

    def make(host: TrainingHost, prepare: Any = prepare_run, **fields: Any) -> TrainerWorker:
        workers.append(make_worker(trainer_settings.model_copy(update=fields), host, prepare))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.drain()


async def check_as_alone(
    checkpoint: Path, queue: JobQueue, registry: AdapterRegistry, job: Job, spec: SftJob, version: int = 1
) -> None:
    """The curve and the weights of a job that runs alone."""
    assert job.state is JobState.SUCCEEDED, job.reason
    losses, run = curve_of(TrainingHost(checkpoint), spec)
    assert await loss_curve(queue, job.id) == pytest.approx(losses, rel=1e-5)
    expected = load(run.lora.to_files("")[WEIGHTS])
    found = load(registry.files(AdapterVersion(spec.adapter, version))[WEIGHTS])
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-4), name


async def test_jobs_that_wait_take_their_steps_together(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path, store: ObjectStore
) -> None:
    # Long enough that the first has steps left when the last is claimed, however slow the queue's answers are.
    specs = [small_job(number, epochs=12 + number % 2) for number in range(5)]
    jobs = [await queue.submit(spec) for spec in specs]
    host = SmallHost(checkpoint, pause=PAUSE)
    forwards = Forwards(host)
    start(host)
    for job, spec in zip(jobs, specs, strict=True):
        done = await finished(queue, job.id)
        await check_as_alone(checkpoint, queue, registry, done, spec)
        assert done.attempts == 1
        assert done.metrics["loss_after"] < done.metrics["loss_before"]
        assert store.list(f"jobs/{job.id}/") == []
    assert max(forwards.adapters) == 5
    assert len(forwards.adapters) < sum(6 + 2 for _ in jobs)
    assert host.memory_budget.held() == {}
    messages = [event.data.get("message") for event in await events_of(queue, jobs[4].id)]
    assert "takes its steps together with those of 4 other jobs" in messages


@pytest.mark.thorough
async def test_a_job_joins_those_that_run(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    long, short = small_job(0, epochs=25), small_job(1)
    host = SmallHost(checkpoint, pause=0.05)
    first = await queue.submit(long)
    start(host)
    await until(queue, first.id, lambda job: job.progress.step >= 2)
    second = await queue.submit(short)
    done = await finished(queue, second.id)
    assert (await queue.get(first.id)).state is JobState.RUNNING
    await check_as_alone(checkpoint, queue, registry, done, short)
    await check_as_alone(checkpoint, queue, registry, await finished(queue, first.id), long)


async def test_jobs_of_one_adapter_run_in_turn(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    jobs = [await queue.submit(small_job(0, adapter="one", lora={"rank": 4})) for _ in range(2)]
    start(SmallHost(checkpoint))
    assert [(await finished(queue, job.id)).result_adapter for job in jobs] == ["one@1", "one@2"]
    assert registry.manifest(AdapterVersion("one", 2)).parent == "one@1"


async def test_one_that_is_cancelled_and_one_that_fails_leave_the_others_as_they_are(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    """One is cancelled, one diverges, and one meets a bug of its own."""

    def prepare(spec: SftJob, host: TrainingHost, parent: Any, *rest: Any) -> Any:
        run = prepare_run(spec, host, parent, *rest)
        if spec.adapter == "a2":
            with torch.no_grad():
                run.lora.flat_a.fill_(float("nan"))
        if spec.adapter == "a3":
            run._end_step = lambda *_: {}["no such metric"]
        return run

    specs = [small_job(number, epochs=30 if number == 1 else 4) for number in range(5)]
    jobs = [await queue.submit(spec) for spec in specs]
    start(SmallHost(checkpoint, pause=0.05), prepare)
    await until(queue, jobs[1].id, lambda job: job.progress.step >= 1)
    await queue.cancel(jobs[1].id)
    done = [await finished(queue, job.id) for job in jobs]
    assert done[1].state is JobState.CANCELLED
    assert done[1].progress.step < 30
    assert done[2].state is JobState.FAILED
    assert "training diverged at step 0" in (done[2].reason or "")
    assert (done[3].state, done[3].attempts) == (JobState.FAILED, 3)
    assert "no such metric" in (done[3].reason or "")
    for number in (0, 4):
        assert done[number].attempts == 1
        await check_as_alone(checkpoint, queue, registry, done[number], specs[number])
    assert registry.names() == ["a0", "a4"]


async def test_a_forward_that_fails_for_several_is_taken_by_each_alone(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    specs = [small_job(number) for number in range(3)]
    jobs = [await queue.submit(spec) for spec in specs]
    host = SmallHost(checkpoint)
    forwards = Forwards(host)
    forwards.fail = True
    start(host)
    for job, spec in zip(jobs, specs, strict=True):
        done = await finished(queue, job.id)
        assert done.attempts == 1
        await check_as_alone(checkpoint, queue, registry, done, spec)
    assert sum(count > 1 for count in forwards.adapters) == 1, "tried once, and alone from then on"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"lora": {"rank": 2}}, "another shape"),
        ({"max_tokens_per_microbatch": 64}, "another shape"),
        ({"examples": [{"prompt": "x" * 200, "completion": "y"}]}, "tokens, over the 120 for steps"),
    ],
)
async def test_a_job_that_does_not_fit_is_handed_back_and_comes_next(
    queue: JobQueue,
    registry: AdapterRegistry,
    start: Start,
    checkpoint: Path,
    other: dict[str, Any],
    reason: str,
) -> None:
    specs = [small_job(0), small_job(1, **other), small_job(2)]
    jobs = [await queue.submit(spec) for spec in specs]
    start(SmallHost(checkpoint, pause=0.02), trainer_tokens_a_step=120)
    done = [await finished(queue, job.id) for job in jobs]
    for job, spec in zip(done, specs, strict=True):
        assert job.attempts == 1
        await check_as_alone(checkpoint, queue, registry, job, spec)
    states = [event.data for event in await events_of(queue, jobs[1].id) if event.kind == "state"]
    assert [state["state"] for state in states] == ["queued", "running", "queued", "running", "succeeded"]
    assert reason in states[2]["reason"]
    assert done[1].finished_at is not None
    assert done[2].started_at is not None
    assert done[1].finished_at <= done[2].started_at or done[2].attempts == 1


async def test_memory_decides_who_takes_steps_together(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    specs = [small_job(number) for number in range(3)]
    run = prepare_run(specs[0], TrainingHost(checkpoint), None)
    adapter = run._memory.adapter
    enough_for_two = 2 * adapter + run.shared_working + adapter // 2
    jobs = [await queue.submit(spec) for spec in specs]
    host = SmallHost(checkpoint, train_memory_bytes=enough_for_two)
    forwards = Forwards(host)
    start(host)
    for job, spec in zip(jobs, specs, strict=True):
        await check_as_alone(checkpoint, queue, registry, await finished(queue, job.id), spec)
    assert max(forwards.adapters) == 2
    assert host.memory_budget.held() == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [{"trainer_jobs_a_step": 1}, {"job_max_attempts": 1}], ids=["limit", "last attempt"])
async def test_one_job_a_step_is_one_job_after_another(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path, limit: dict[str, int]
) -> None:
    """So is the last attempt of each: what kills a process takes no others with it then."""
    specs = [small_job(number) for number in range(2)]
    jobs = [await queue.submit(spec) for spec in specs]
    host = SmallHost(checkpoint)
    forwards = Forwards(host)
    start(host, **limit)
    first, second = [await finished(queue, job.id) for job in jobs]
    assert set(forwards.adapters) == {1}
    assert first.finished_at is not None
    assert second.started_at is not None
    assert first.finished_at <= second.started_at


async def test_a_drain_checkpoints_and_hands_all_back(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path
) -> None:
    specs = [small_job(number, epochs=12, checkpoint_every=100) for number in range(3)]
    jobs = [await queue.submit(spec) for spec in specs]
    worker = start(SmallHost(checkpoint, pause=PAUSE))
    for job in jobs:
        await until(queue, job.id, lambda found: found.progress.step >= 3)
    assert await asyncio.to_thread(worker.drain)
    for job in jobs:
        waiting = await queue.get(job.id)
        assert (waiting.state, waiting.attempts) == (JobState.QUEUED, 0)
    start(SmallHost(checkpoint))
    for job, spec in zip(jobs, specs, strict=True):
        await check_as_alone(checkpoint, queue, registry, await finished(queue, job.id), spec)
        messages = [event.data.get("message", "") for event in await events_of(queue, job.id)]
        assert any("resumed after step" in message for message in messages)


@pytest.mark.thorough
async def test_a_job_that_waits_for_a_store_holds_up_no_other(
    queue: JobQueue, registry: AdapterRegistry, start: Start, checkpoint: Path, s3: RunningServer
) -> None:
    """One that ends cannot publish, one that comes cannot be prepared, and one that runs goes on."""
    specs = [small_job(0, epochs=40), small_job(1), small_job(2)]
    jobs = [await queue.submit(spec) for spec in specs[:2]]
    start(SmallHost(checkpoint, pause=0.02))
    await until(queue, jobs[1].id, lambda job: job.progress.step >= 1)
    with s3.down():
        ended = await until(queue, jobs[1].id, lambda job: job.progress.step == job.progress.total_steps)
        jobs.append(await queue.submit(specs[2]))
        before = (await queue.get(jobs[0].id)).progress.step
        await until(queue, jobs[0].id, lambda job: job.progress.step >= before + 5)
        assert ended.state is JobState.RUNNING
    for job, spec in zip(jobs, specs, strict=True):
        done = await finished(queue, job.id)
        assert done.attempts == 1
        await check_as_alone(checkpoint, queue, registry, done, spec)


@pytest.fixture
async def spawn(
    trainer_settings: TrainerSettings, checkpoint: Path, tmp_path: Path
) -> AsyncIterator[Callable[[], ForkedProcess]]:
    processes: list[ForkedProcess] = []
    access, secret = trainer_settings.s3_access_key, trainer_settings.s3_secret_key
    environment = {
        **os.environ,
        "TEMPER_REDIS_URL": trainer_settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": trainer_settings.s3_endpoint,
        "TEMPER_S3_BUCKET": trainer_settings.s3_bucket,
        "TEMPER_S3_ACCESS_KEY": "" if access is None else access.get_secret_value(),
        "TEMPER_S3_SECRET_KEY": "" if secret is None else secret.get_secret_value(),
        "TEMPER_JOB_RECLAIM_SECONDS": str(RECLAIM),
        "TEMPER_JOB_HEARTBEAT_SECONDS": "0.2",
        "TEMPER_CHECKPOINT_DIR": str(trainer_settings.checkpoint_dir),
        "TEMPER_SMALL_CHECKPOINT": str(checkpoint),
        "TEMPER_SMALL_PAUSE": str(PAUSE),
    }

    def start() -> ForkedProcess:
        processes.append(ForkedProcess(small_process, environment=environment, log=tmp_path / "worker.log"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


async def test_kill_nine_in_the_middle_resumes_each(
    queue: JobQueue, registry: AdapterRegistry, spawn: Callable[[], ForkedProcess], checkpoint: Path
) -> None:
    specs = [small_job(number, epochs=epochs) for number, epochs in enumerate((14, 7, 7))]
    assert {prepare_run(spec, SmallHost(checkpoint), None).total_steps for spec in specs} == {14}
    jobs = [await queue.submit(spec) for spec in specs]
    process = spawn()
    for job in jobs:
        await until(queue, job.id, lambda found: found.progress.step >= 5)
    process.kill()
    process.wait()
    assert [(await queue.get(job.id)).state for job in jobs] == [JobState.RUNNING] * 3
    spawn()
    for job, spec in zip(jobs, specs, strict=True):
        done = await finished(queue, job.id)
        assert done.attempts == 2
        await check_as_alone(checkpoint, queue, registry, done, spec)
        messages = [event.data.get("message", "") for event in await events_of(queue, job.id)]
        resumed = [message for message in messages if "resumed" in message]
        assert resumed
        assert "after step 0 " not in resumed[0]
