"""A release that was rolled back, beside what the newer one has written: each kind of document with a number, a field
or a word that this release does not know is refused by name or left alone, and stays as it is, byte for byte."""

from __future__ import annotations

import inspect
import json
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.errors import NewerSchema
from services.common.evaluation.runs.store import EvaluationStore
from services.common.jobs.training_sessions.names import checkpoint_key
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.security.api_keys import Scope
from services.common.storage.record_versions import LOGGED_REQUEST
from services.gateway.api.responses.documents import DocumentStore
from services.gateway.api.responses.store import Place, ResponseStore
from services.gateway.core.webhook_store import Attempt, WebhookStore
from services.gateway.server.app import open_stores
from services.learning.request_log.record import LoggedRequest
from services.trainer.training_sessions.storage import SessionStorage, Snapshot
from tests.integration.documents import (
    KINDS,
    MODEL,
    Make,
    Use,
    World,
    Written,
    a_batch,
    a_canary,
    a_checkpoint_of_tinker,
    a_data_set,
    a_delivery,
    a_file,
    a_job,
    a_learner,
    a_result,
    a_run,
    a_run_of_tinker,
    a_session_of_tinker,
    a_suite,
    a_version,
    an_opinion,
    consumer_of,
    gates_of_a_run,
    hashes_of_training,
    world,
)
from tests.integration.jobs import read_events, sft, silence
from tests.integration.logging_gateway import Gateway, gateway
from tests.integration.test_registry import files
from tests.integration.test_stored_documents import chat
from tests.stack import PATIENCE

__all__ = ["gateway", "world"]


def is_hash(place: str) -> bool:
    return place.startswith("temper:")


def content(world: World, place: str) -> Any:
    return world.raw.hgetall(place) if is_hash(place) else world.store.get(place).data


def plant_number(world: World, place: str) -> None:
    if is_hash(place):
        world.raw.hset(place, "schema", "3")
    else:
        found = json.loads(world.store.get(place).data)
        world.store.put(place, json.dumps({**found, "schema": 3}).encode())


def plant_field(world: World, place: str, strict: tuple[str, ...]) -> None:
    if is_hash(place):
        (name,) = strict
        found = json.loads(str(world.raw.hget(place, name)))
        world.raw.hset(place, name, json.dumps({**found, "of_tomorrow": {"a": 1}}))
    else:
        found = json.loads(world.store.get(place).data)
        world.store.put(place, json.dumps({**found, "of_tomorrow": {"a": 1}}).encode())


async def answer(use: Use) -> Any:
    done = use()
    return await done if inspect.isawaitable(done) else done


async def check(world: World, written: Written, says: str) -> None:
    before = content(world, written.place)
    for use in written.refuses:
        with pytest.raises(NewerSchema) as refused:
            await answer(use)
        said = refused.value.message
        assert written.named in said, said
        assert says in said, said
        assert "by a later release; upgrade this service" in said, said
    for use, expected in written.leaves:
        assert await answer(use) == expected
    assert content(world, written.place) == before


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
async def test_a_number_that_is_not_known(make: Make, world: World) -> None:
    written = await make(world)
    plant_number(world, written.place)
    await check(world, written, "has schema 3 of ")


STRICT: list[Make] = [
    a_batch,
    a_file,
    a_suite,
    a_run,
    a_result,
    gates_of_a_run,
    hashes_of_training,
    an_opinion,
    a_data_set,
    a_canary,
    a_learner,
    a_session_of_tinker,
    a_run_of_tinker,
    a_checkpoint_of_tinker,
]


@pytest.mark.parametrize("make", STRICT, ids=lambda make: make.__name__)
async def test_a_field_that_is_not_known(make: Make, world: World) -> None:
    """Under a number that is known: whoever reads strictly refuses it, because writing it again would lose it."""
    written = await make(world)
    if make is an_opinion:  # said again it is another opinion, which takes its place: nothing of it is read
        del written.refuses[1:3]
    if make is a_batch:  # a consumer reads the spec alone
        written.leaves.clear()
    assert written.strict is not None
    plant_field(world, written.place, written.strict)
    await check(world, written, "does not know at 'of_tomorrow'")


LISTS: dict[Make, list[str]] = {
    a_job: ["train/jobs", "fine_tuning/jobs", "forge"],
    a_batch: ["batches"],
    a_version: ["adapters/toy/versions"],
    a_file: ["files"],
    a_suite: ["eval/suites"],
    a_run: ["evaluations"],
    an_opinion: ["feedback"],
    a_data_set: ["datasets"],
    a_canary: ["canaries"],
    a_learner: ["learners"],
}
EVERYBODYS = {"adapters/toy/versions", "eval/suites", "canaries"}


async def test_lists_have_what_is_known(world: World, gateway: Gateway) -> None:
    """One document that this release cannot read hides no other. It is named beside them, with what a GET of it says,
    to who may see it: whose it is, and an administrator."""
    expected: dict[str, Written] = {}
    for make, paths in LISTS.items():
        expected |= dict.fromkeys(paths, await make(world))
    EvaluationStore(world.store).all.add("job-1", "me")
    world.registry.publish("other", files("a"), base_digest="base", job_id=None)
    for place in {written.place for written in expected.values()} | {"adapters/other/CURRENT"}:
        plant_number(world, place)
    running, keys = gateway(opened=open_stores, api_keys_poll_seconds=0.05)
    for name in ("me", "key-1"):
        keys.add(name, *Scope)
        keys.change(name, id=name)
    keys.add("trainer", Scope.TRAIN, Scope.INFERENCE)

    def listed(path: str, key: str) -> Any:
        return httpx.get(f"{running.url}/v1/{path}", headers=keys.bearer(key), timeout=PATIENCE)

    running.wait_for(lambda: listed("datasets", "trainer").status_code == 200)
    for path, written in expected.items():
        answer = listed(path, "me")
        assert "unreadable" in answer.json(), f"{path}: {answer.text}"
        (told,) = [one for one in answer.json()["unreadable"] if one["id"] in written.place + written.named]
        assert told["code"] == "newer_schema"
        assert "has schema 3 of" in told["message"]
        assert "by a later release; upgrade this service" in told["message"]
        if path not in ("files", "batches"):  # of which each key has its own
            assert ("unreadable" in listed(path, "trainer").json()) == (path in EVERYBODYS), path
    (told,) = (adapters := listed("adapters", "trainer").json())["unreadable"]
    assert (told["id"], [one["name"] for one in adapters["data"]]) == ("other", ["toy"])
    assert listed("adapters/other/versions", "me").status_code == 503, "which of them is current is not known"
    jobs = [TRAINING.job_key(str(one)) for one in world.raw.zrange(TRAINING.index, 0, -1)]
    assert len(listed("train/jobs", "me").json()["data"]) == len(jobs) - 1
    later = next(job for job in jobs if world.raw.hget(job, "schema") == "3")
    world.raw.hset(later, "key_id", keys.entries["trainer"].id)
    (told,) = listed("train/jobs", "trainer").json()["unreadable"]
    assert told["id"] in later


async def test_the_list_of_deliveries_has_what_is_known(world: World) -> None:
    later, other = await a_delivery(world), await a_delivery(world)
    plant_number(world, later.place)
    told: list[str] = []
    store: WebhookStore = world.closing(WebhookStore(world.settings))
    found = await store.list(limit=9, pass_over=lambda one, key_id, error: told.append(f"{one} {key_id} {error.code}"))
    assert [f"delivery {one.id}" for one in found] == [other.named]
    assert told == [later.named.removeprefix("delivery ") + " None newer_schema"]


async def test_a_job_with_a_field_that_is_not_known_waits_for_who_knows_it(world: World) -> None:
    """It is not failed, and counts no attempt; its events say why it waits, once for each engine."""
    queue: JobQueue = world.closing(JobQueue(world.settings))
    job, other = await queue.submit(sft()), await queue.submit(sft(adapter="other"))
    key = TRAINING.job_key(job.id)
    as_it_was = str(world.raw.hget(key, "spec"))
    world.raw.hset(key, "spec", json.dumps({**json.loads(as_it_was), "of_tomorrow": 1}))
    before = world.raw.hgetall(key)
    old = consumer_of(world)
    claimed = old.claim(0.05)
    assert claimed is not None
    assert claimed.id == other.id
    silence(world.raw)
    old.heartbeat(claimed)
    assert old.claim(0) is None
    assert world.raw.hgetall(key) == before
    messages = [entry["data"] for _, entry in world.raw.xrange(f"{key}:events") if entry["kind"] == "log"]
    assert len(messages) == 1
    assert "left to a later release: 'sft.of_tomorrow' of its spec is not known here" in messages[0]
    world.raw.hset(key, "spec", as_it_was)  # an engine that knows it
    silence(world.raw)
    old.heartbeat(claimed)
    taken = consumer_of(world, "new").claim(0.05)
    assert taken is not None
    assert (taken.id, taken.attempt) == (job.id, 1)


async def test_a_job_that_is_not_known_can_be_cancelled(world: World) -> None:
    queue: JobQueue = world.closing(JobQueue(world.settings))
    job = await queue.submit(sft())
    world.raw.hset(TRAINING.job_key(job.id), "spec", json.dumps({"kind": "of_tomorrow", "adapter": "math"}))
    assert consumer_of(world).claim(0) is None
    assert (await queue.cancel(job.id)).state == "cancelled"
    assert [event.data.get("state") for event in await read_events(queue, job.id)][-1] == "cancelled"


async def test_a_spec_of_a_later_release_in_the_stream_is_not_buried(world: World) -> None:
    text = sft().model_dump_json()
    world.raw.xadd("temper:jobs", {"spec": text, "schema": "2"})
    assert consumer_of(world).claim(0) is None
    assert world.raw.xlen("temper:jobs") == 1
    assert world.raw.xlen("temper:jobs:dead") == 0


async def test_pointers_keep_what_is_not_known_of_them(world: World) -> None:
    registry = world.registry
    one, two = (registry.publish("toy", files(tag), base_digest="base", job_id=None).ref for tag in "ab")
    registry.attach(two)
    for key in ("adapters/toy/CURRENT", f"attached/{MODEL}"):
        plant_field(world, key, ())
    registry.rollback("toy")
    three = registry.publish("toy", files("c"), base_digest="base", job_id=None).ref
    registry.set_current(one)
    registry.attach(three)
    registry.detach("toy")
    for key in ("adapters/toy/CURRENT", f"attached/{MODEL}"):
        assert json.loads(world.store.get(key).data)["of_tomorrow"] == {"a": 1}
    assert (registry.current("toy"), registry.attached()) == (one, None)


async def test_documents_keep_what_is_not_known_of_them(world: World) -> None:
    store = DocumentStore(world.closing(ResponseStore(world.gateway)))
    kept = chat("hi")
    place = Place("me", kept.id)
    await store.save(place, kept)
    plant_field(world, place.key, ("body",))
    world.raw.hset(place.key, "of_tomorrow", "b")
    await store.change(place, lambda found: found.body.update(metadata={"n": "2"}))
    assert world.raw.hget(place.key, "of_tomorrow") == "b"
    body = json.loads(str(world.raw.hget(place.key, "body")))
    assert (body["of_tomorrow"], body["metadata"]) == ({"a": 1}, {"n": "2"})


async def test_a_checkpoint_of_a_session(world: World) -> None:
    storage = SessionStorage(world.store, world.registry, None, "base")  # type: ignore[arg-type]
    adapter = {WEIGHTS: safetensors.torch.save({"a": torch.ones(2)}), CONFIG: b'{"r": 1}'}
    storage.save_checkpoint("c", Snapshot(adapter, {}, 4, None))
    data = world.store.get(checkpoint_key("c")).data
    number = b'{\\"schema\\": 1'
    assert data.count(number) == 1
    later = data.replace(number, b'{\\"schema\\": 3')
    world.store.put(checkpoint_key("c"), later)
    with pytest.raises(NewerSchema, match=r"checkpoint 'c' has schema 3 of session checkpoints.* knows up to 1"):
        storage.checkpoint("c")
    assert world.store.get(checkpoint_key("c")).data == later


def test_a_line_of_the_request_log() -> None:
    line = LoggedRequest(id="r", at=1.0, kind="chat", model="m", choices=()).model_dump()
    for later, says in (({"schema": 2}, "has schema 2 of logged requests"), ({"of_tomorrow": 1}, "'of_tomorrow'")):
        with pytest.raises(NewerSchema, match=f"^part 7.*{says}"):
            LoggedRequest.parse(json.dumps({**LOGGED_REQUEST.stamped(line), **later}).encode(), "part 7")


async def test_a_delivery_that_others_know_better_is_settled_by_them(world: World) -> None:
    """Who has claimed a delivery before it was written anew says how it went, and changes nothing else."""
    written = await a_delivery(world)
    store: WebhookStore = world.closing(WebhookStore(world.settings))
    world.raw.hset(written.place, "of_tomorrow", "b")
    (made,) = await store.list(limit=9)
    await store.settle(made.id, "delivered", Attempt(at=1.0, status=200, seconds=0.1))
    assert world.raw.hget(written.place, "of_tomorrow") == "b"
