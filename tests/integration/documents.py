"""Documents of every kind, written by this release on real stores, and what is done with them: for tests of what a
later release wrote."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.evaluation.runs.records import GateRecord, RunRecord, RunResult
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.record import checkpoints_of
from services.common.queue.consumer import JobConsumer
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.responses.documents import DocumentStore
from services.gateway.api.responses.store import Place, ResponseStore
from services.gateway.api.training.tinker.names import RunId
from services.gateway.api.training.tinker.records import CheckpointRecord, SessionRecord, TinkerRecords
from services.gateway.api.training.tinker.records import RunRecord as TinkerRun
from services.gateway.core.batch_queue import BATCHES, BatchConsumer, BatchQueue
from services.gateway.core.file_store import FileStore, NewFile, StoreThreads, new_file_id
from services.gateway.core.webhook_store import WebhookStore
from services.gateway.settings import GatewaySettings
from services.learning.canaries.store import ROOT as CANARIES
from services.learning.canaries.store import CanaryFilter, CanaryStore
from services.learning.datasets.build import Built, DatasetReport
from services.learning.datasets.spec import DatasetSpec
from services.learning.datasets.store import DatasetStore, NewDataset
from services.learning.feedback.store import ROOT as FEEDBACK
from services.learning.feedback.store import FeedbackFilter, FeedbackStore
from services.learning.learners.store import ROOT as LEARNERS
from services.learning.learners.store import LearnerStore, NewLearner
from services.trainer.jobs.base import RunState
from services.trainer.runtime.checkpoint import Checkpoint, CheckpointStore
from tests.integration.jobs import RECLAIM, sft
from tests.integration.servers import RunningServer
from tests.integration.test_batches import spec as batch_spec
from tests.integration.test_canary_store import new as new_canary
from tests.integration.test_feedback import up
from tests.integration.test_learner_store import BEGUN, policy
from tests.integration.test_registry import files
from tests.integration.test_response_store import record as response
from tests.integration.test_stored_documents import chat
from tests.integration.test_suites import EXACT, sums

Use: TypeAlias = Callable[[], Any]
MODEL = "qwen3.5"
SESSION = "tinker-0123456789abcdef"


@dataclass
class World:
    """This release on real stores."""

    settings: CommonSettings
    raw: redis.Redis
    store: ObjectStore
    registry: AdapterRegistry
    path: Path
    opened: AsyncExitStack

    @property
    def gateway(self) -> GatewaySettings:
        return GatewaySettings(redis_url=self.settings.redis_url)

    def closing(self, made: Any) -> Any:
        """The same, closed at the end."""
        close = getattr(made, "aclose", None) or made.close

        async def end() -> None:
            done = close()
            if inspect.isawaitable(done):
                await done

        self.opened.push_async_callback(end)
        return made


@dataclass
class Written:
    """A document that this release wrote, and what is done with it."""

    named: str
    """What an error calls it."""
    place: str
    """Hash in Redis, or object."""
    refuses: list[Use]
    """What raises NewerSchema."""
    leaves: list[tuple[Use, Any]] = field(default_factory=list)
    """What passes it over, and with which answer."""
    strict: tuple[str, ...] | None = ()
    """JSON in it that is read strictly: field of the hash, then names; None: what is unknown there is kept instead."""


Make: TypeAlias = Callable[[World], Awaitable[Written]]


@pytest.fixture
async def world(
    settings: CommonSettings,
    raw: redis.Redis,
    store: ObjectStore,
    registry: AdapterRegistry,
    valkey: RunningServer,
    tmp_path: Path,
) -> AsyncIterator[World]:
    async with AsyncExitStack() as opened:
        yield World(settings, raw, store, registry, tmp_path, opened)


def consumer_of(world: World, owner: str = "old") -> JobConsumer:
    made: JobConsumer = world.closing(JobConsumer(world.settings, owner=owner, reclaim_seconds=RECLAIM))
    return made


async def a_job(world: World) -> Written:
    queue: JobQueue = world.closing(JobQueue(world.settings))
    job = await queue.submit(sft())
    behind = await queue.submit(sft())
    consumer = consumer_of(world)
    refuses = [
        lambda: queue.get(job.id),
        lambda: queue.cancel(job.id),
        lambda: queue.cancel(job.id, "its data set is erased"),
        lambda: queue.pause(job.id),
        lambda: queue.resume(job.id),
        lambda: queue.list(),
        lambda: queue.unfinished(),
        lambda: queue.versions_needed(),
        lambda: consumer.versions_needed(),
    ]
    assert behind.id != job.id
    return Written(
        f"job {job.id}", TRAINING.job_key(job.id), refuses, [(lambda: consumer.claim(0), None)] * 2, strict=None
    )


async def a_batch(world: World) -> Written:
    queue: BatchQueue = world.closing(BatchQueue(world.settings))
    batch = await queue.submit(batch_spec())
    consumer = world.closing(BatchConsumer(world.settings, owner="old"))
    refuses = [
        lambda: queue.owned("me", batch.id),
        lambda: queue.cancel("me", batch.id),
        lambda: queue.remove("me", batch.id),
        lambda: queue.list("me", limit=9),
    ]
    # Of a batch the spec stands in `metadata`, too, which is what is shown.
    left: list[tuple[Use, Any]] = [(lambda: consumer.claim(0), None)]
    return Written(f"batch {batch.id}", BATCHES.job_key(batch.id), refuses, left, ("metadata",))


async def a_version(world: World) -> Written:
    world.registry.publish("toy", files("a"), base_digest="base", job_id="job-1")
    manifest = world.registry.publish("toy", files("b"), base_digest="base", job_id="job-2")
    one = AdapterVersion("toy", 1)
    refuses = [
        lambda: world.registry.manifest(one),
        lambda: world.registry.files(one),
        lambda: world.registry.versions("toy"),
        lambda: world.registry.set_current(one),
        lambda: world.registry.attach(one),
        lambda: world.registry.delete("toy"),
        lambda: world.registry.published("toy", "job-1"),
        lambda: prune(world.registry, "toy", RetentionPolicy(keep=1)),
    ]
    assert manifest.version == 2
    key = "adapters/toy/versions/00000001/manifest.json"
    return Written("the manifest of toy@1", key, refuses, strict=None)


async def what_is_current(world: World) -> Written:
    manifest = world.registry.publish("toy", files("a"), base_digest="base", job_id="job-1")
    refuses = [
        lambda: world.registry.current("toy"),
        lambda: world.registry.pointers(),
        lambda: world.registry.advance(manifest),
        lambda: world.registry.set_current(manifest.ref),
        lambda: world.registry.publish("toy", files("b"), base_digest="base", job_id="job-2"),
        lambda: prune(world.registry, "toy", RetentionPolicy(keep=1)),
    ]
    return Written("adapters/toy/CURRENT", "adapters/toy/CURRENT", refuses, strict=None)


async def what_is_attached(world: World) -> Written:
    manifest = world.registry.publish("toy", files("a"), base_digest="base", job_id="job-1")
    world.registry.attach(manifest.ref)
    refuses = [
        world.registry.attached,
        lambda: world.registry.detach("toy"),
        lambda: world.registry.attach(manifest.ref),
        lambda: world.registry.delete("toy"),
    ]
    return Written(f"attached/{MODEL}", f"attached/{MODEL}", refuses, strict=None)


async def the_number_of_a_job(world: World) -> Written:
    world.registry.publish("toy", files("a"), base_digest="base", job_id="job-1")
    key = "adapters/toy/jobs/job-1"
    refuses = [
        lambda: world.registry.published("toy", "job-1"),
        lambda: world.registry.publish("toy", files("a"), base_digest="base", job_id="job-1"),
    ]
    return Written(key, key, refuses, strict=None)


async def what_was_deleted(world: World) -> Written:
    manifest = world.registry.publish("toy", files("a"), base_digest="base", job_id=None)
    world.registry.delete("toy")
    refuses = [
        lambda: world.registry.was_published(manifest.ref),
        lambda: world.registry.publish("toy", files("a"), base_digest="base", job_id=None),
    ]
    return Written("deleted/toy", "deleted/toy", refuses, strict=None)


async def a_checkpoint(world: World) -> Written:
    checkpoints = CheckpointStore(world.store, world.path)
    checkpoints.save("job-1", "sha", Checkpoint(3, RunState({"w": torch.ones(2)}, {"step": 3})), fence=2)
    key = f"{checkpoints_of('job-1')}00000002-00000003/manifest.json"
    return Written("the checkpoint after step 3", key, [lambda: checkpoints.newest("job-1", "sha")], strict=None)


async def a_file(world: World) -> Written:
    store = FileStore(world.store)
    info = store.create(NewFile("me", new_file_id(), "a.jsonl", "batch", 5, seconds=1), [b"{}\n"])
    key = next(key for key in world.store.list("files/") if key.endswith("file.json"))
    refuses = [lambda: store.get("me", info.id), lambda: store.delete("me", info.id)]
    return Written(key, key, refuses, [(store.sweep, 0)])


async def a_response(world: World) -> Written:
    store: ResponseStore = world.closing(ResponseStore(world.gateway))
    kept = response(background=True, status="in_progress")
    place = Place("me", kept.id)
    await store.save(place, kept)
    world.raw.hset(place.key, "beat", "1")  # its gateway is long gone
    refuses = [lambda: store.load(place), lambda: store.cancel(place)]
    left: list[tuple[Use, Any]] = [(lambda: store.save(place, kept, only_active=True), False)]
    return Written(f"response {kept.id}", place.key, refuses, left, strict=None)


async def a_stored_chat(world: World) -> Written:
    responses: ResponseStore = world.closing(ResponseStore(world.gateway))
    store, kept = DocumentStore(responses), chat("hi")
    place = Place("me", kept.id)
    await store.save(place, kept)
    refuses = [
        lambda: store.find(place),
        lambda: store.change(place, lambda found: found.items.clear()),
        lambda: store.chats("me", lambda _: True, limit=9),
    ]
    left: list[tuple[Use, Any]] = [(lambda: store.save(place, kept, replaces=True), False)]
    return Written(kept.id, place.key, refuses, left, strict=None)


async def a_suite(world: World) -> Written:
    suites = SuiteStore(world.store)
    made = suites.create("sums", EXACT, sums(3))
    refuses = [
        lambda: suites.get("sums"),
        lambda: suites.create("sums", EXACT, sums(2)),
        lambda: suites.delete(made.ref),
        lambda: suites.erase("user:*:1", lambda *_: None),
    ]
    return Written("suite sums@1", "suites/sums/00000001/suite.json", refuses)


def run_record(store: EvaluationStore) -> RunRecord:
    record = RunRecord(id="job-1", suites=(), targets=(), seed=1, base_digest="base", created_at=1.0)
    return store.begin(record, [])


async def a_run(world: World) -> Written:
    store = EvaluationStore(world.store)
    record = run_record(store)
    refuses = [lambda: store.record("job-1"), lambda: store.begin(record, []), lambda: store.erase("sums", {"1"})]
    return Written("evaluation job-1", "evaluations/job-1/run.json", refuses)


async def a_result(world: World) -> Written:
    store = EvaluationStore(world.store)
    result = store.finish(RunResult(id="job-1", summaries=(), comparisons=(), finished_at=2.0))
    refuses = [lambda: store.result("job-1"), lambda: store.finish(result)]
    return Written("result of evaluation job-1", "evaluations/job-1/result.json", refuses)


async def gates_of_a_run(world: World) -> Written:
    store = EvaluationStore(world.store)
    store.decide("job-1", GateRecord(gates=()))
    return Written("gates of evaluation job-1", "evaluations/job-1/gates.json", [lambda: store.gates("job-1")])


async def hashes_of_training(world: World) -> Written:
    hashes, source = TrainingHashes(world.registry), DataSource(adapter="toy", job_id="job-1")
    hashes.write(source, "sft", [], [])
    key = f"{source.prefix}record.json"
    return Written(key, key, [lambda: hashes.begun(source), lambda: list(hashes.read([source], "grams"))])


async def an_opinion(world: World) -> Written:
    made = FeedbackStore(world.settings, max_bytes=2**20, keep_seconds=3600.0)
    store: FeedbackStore = world.closing(made)
    kept, _ = await store.add("key-1", up(user="ann"))
    refuses = [
        lambda: store.get(kept.id),
        lambda: store.add("key-1", up(user="ann", thumb="down")),
        lambda: store.replace(kept, up(user="ann", thumb="down")),
        lambda: store.list(FeedbackFilter(None), limit=9),
        lambda: store.delete_all(FeedbackFilter(None)),
    ]
    return Written(kept.id, FEEDBACK + kept.id, refuses, strict=("body",))


async def a_data_set(world: World) -> Written:
    sets = DatasetStore(world.store)
    spec = DatasetSpec.model_validate({"logged": True})
    built = Built({"train": [], "validation": [], "held_out": []}, DatasetReport(), [])
    made = sets.create(NewDataset("d", spec), built)
    refuses = [
        lambda: sets.get("d"),
        lambda: sets.create(NewDataset("d", spec), built),
        lambda: sets.erase("user:*:1"),
    ]
    return Written("dataset d@1", f"datasets/d/{made.version:08d}/dataset.json", refuses)


async def a_canary(world: World) -> Written:
    store: CanaryStore = world.closing(CanaryStore(world.settings))
    record = await store.begin(new_canary())
    refuses = [lambda: store.get(record.id), lambda: store.list(CanaryFilter(), limit=9)]
    return Written(record.id, CANARIES + record.id, refuses, [(store.running, [])], ("new",))


async def a_learner(world: World) -> Written:
    store: LearnerStore = world.closing(LearnerStore(world.settings))
    await store.create(NewLearner(policy()), BEGUN)
    refuses = [lambda: store.get("l"), lambda: store.change("l", lambda one: (one.cycle, []))]
    return Written("learner l", f"{LEARNERS}l", refuses, [(store.all, [])], ("cycle",))


async def a_delivery(world: World) -> Written:
    store: WebhookStore = world.closing(WebhookStore(world.settings))
    queue: JobQueue = world.closing(JobQueue(world.settings))
    await queue.cancel((await queue.submit(sft())).id)
    (event,) = await store.events(9)
    assert await store.make(event, ["https://example.com"])
    made, *_ = await store.list(limit=9)
    refuses = [lambda: store.get(made.id), lambda: store.resend(made.id), lambda: store.list(limit=9)]
    return Written(f"delivery {made.id}", f"temper:webhook:{made.id}", refuses, [(lambda: store.claim(9, 0), [])], None)


def tinker(world: World) -> TinkerRecords:
    return TinkerRecords(world.store, world.closing(StoreThreads()))


async def a_session_of_tinker(world: World) -> Written:
    await tinker(world).add_session(SessionRecord(id=SESSION, owner="", created_at=1.0))
    key = f"tinker/sessions/{SESSION}.json"
    return Written(key, key, [lambda: tinker(world).session(SESSION)])


async def a_run_of_tinker(world: World) -> Written:
    run = TinkerRun(
        id=str(RunId(SESSION, 0)), owner="", created_at=1.0, training_session="t", base_model="m", rank=2, adapter="toy"
    )
    await tinker(world).add_run(run)
    key = f"tinker/runs/{SESSION}/0000.json"
    return Written(key, key, [lambda: tinker(world).run(RunId(SESSION, 0)), lambda: tinker(world).runs(SESSION)])


async def a_checkpoint_of_tinker(world: World) -> Written:
    run = RunId(SESSION, 0)
    one = {"run": str(run), "owner": "", "kind": "weights", "name": "n", "target": "c", "created_at": 1.0}
    await tinker(world).add_checkpoint(CheckpointRecord.model_validate(one | {"expires_at": 2.0}))
    key = f"tinker/checkpoints/{SESSION}/0000/weights/n.json"
    refuses = [
        lambda: tinker(world).checkpoint(run, "weights", "n"),
        lambda: tinker(world).checkpoints(run),
        lambda: tinker(world).tidy(),
    ]
    return Written(key, key, refuses)


KINDS: list[Make] = [
    a_job,
    a_batch,
    a_version,
    what_is_current,
    what_is_attached,
    the_number_of_a_job,
    what_was_deleted,
    a_checkpoint,
    a_file,
    a_response,
    a_stored_chat,
    a_suite,
    a_run,
    a_result,
    gates_of_a_run,
    hashes_of_training,
    an_opinion,
    a_data_set,
    a_canary,
    a_learner,
    a_delivery,
    a_session_of_tinker,
    a_run_of_tinker,
    a_checkpoint_of_tinker,
]
