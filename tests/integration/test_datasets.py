"""Data sets on a real Valkey and S3 server, made over HTTP of what a gateway has logged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.common.errors import NotFound, Unavailable
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import JobState
from services.common.jobs.kinds.kto import KtoJob
from services.common.jobs.record import checkpoints_of
from services.common.jobs.trajectories.segments import Trajectory
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.security.api_keys import Scope
from services.common.storage import versioned_objects
from services.common.storage.object_store import ObjectStore
from services.gateway.api.training.erased_rows import REASON
from services.gateway.server.app import open_stores
from services.learning.datasets.build import Built, DatasetReport
from services.learning.datasets.maker import DatasetMaker
from services.learning.datasets.rows import Row
from services.learning.datasets.spec import DatasetSpec
from services.learning.datasets.store import DatasetStore, NewDataset
from services.learning.request_log.index import user_mark
from services.learning.request_log.log import RequestLog
from tests.integration.jobs import Consumers, must_claim, silence
from tests.integration.logging_gateway import Gateway, ask, everywhere, gateway, log, logged
from tests.stack import PATIENCE
from tests.unit.cli.runner import temper as run_temper
from tests.unit.gateway.key_file import error_of

__all__ = ["gateway", "log"]
SPLIT = {"validation": 0.0, "held_out": 0.0}
Call = Callable[..., httpx.Response]


def calls(gateway: Gateway, **settings: Any) -> tuple[Any, Any, Call]:
    running, keys = gateway(**settings)
    keys.add("trainer", Scope.TRAIN, Scope.INFERENCE)

    def call(method: str, path: str, *, key: str = "trainer", **options: Any) -> httpx.Response:
        return httpx.request(method, running.url + path, headers=keys.bearer(key), timeout=PATIENCE, **options)

    running.wait_for(lambda: call("GET", "/v1/datasets").status_code == 200)
    return running, keys, call


def test_from_traffic_to_examples(
    gateway: Gateway, log: RequestLog, raw: redis.Redis, store: ObjectStore, tmp_path: Path
) -> None:
    running, keys, call = calls(gateway, api_keys_poll_seconds=0.05)
    answers = [
        ask(running, keys, key="trainer", user=user, messages=[{"role": "user", "content": f"zebra of {user}"}])
        for user in ("ann", "bob", "eve")
    ]
    ask(running, keys, key="app", user="ann", messages=[{"role": "user", "content": "of another key"}])
    logged(log, 4)
    for answer, fields in zip(answers, [{"thumb": "up"}, {"correction": "right"}, {"thumb": "down"}], strict=True):
        said = call("POST", "/v1/feedback", json={"completion_id": answer["id"], "user": "judge", **fields})
        assert said.status_code == 201, said.text
    spec = {"name": "thumbs", "logged": True, "split": {"validation": 0.0, "held_out": 0.0}}
    dry = call("POST", "/v1/datasets", json={**spec, "dry_run": True}).json()
    assert (dry["id"], dry["rows"], call("GET", "/v1/datasets").json()["data"]) == (
        None,
        {"train": 3, "validation": 0, "held_out": 0},
        [],
    )
    made = call("POST", "/v1/datasets", json=spec)
    assert made.status_code == 201, made.text
    assert (made.json()["id"], made.json()["rows"]["train"]) == ("thumbs@1", 3)
    assert call("POST", "/v1/datasets", json=spec).json()["id"] == "thumbs@1", "the same rows are the same version"
    used = call("GET", "/v1/feedback").json()["data"]
    assert [one["used_by"] for one in used] == [["thumbs@1"]] * 3

    rows = call("GET", "/v1/datasets/thumbs/rows?limit=2").json()
    assert (rows["total"], rows["has_more"], len(rows["data"])) == (3, True, 2)
    lines = call("GET", "/v1/datasets/thumbs@1/examples?kind=kto").text.splitlines()
    labels = {json.loads(line)["completion"]: json.loads(line)["label"] for line in lines}
    assert labels["right"] is True
    sft = [json.loads(line) for line in call("GET", "/v1/datasets/thumbs@1/examples?kind=sft").text.splitlines()]
    assert sorted(one["completion"] for one in sft) == ["Hello, world", "right"]
    assert call("GET", "/v1/datasets/thumbs/rows?split=held_out").json()["data"] == []

    assert call("GET", "/v1/datasets/thumbs", key="app").status_code == 403
    keys.add("rival", Scope.TRAIN)
    running.wait_for(lambda: call("GET", "/v1/datasets", key="rival").status_code == 200)
    assert call("GET", "/v1/datasets/thumbs", key="rival").status_code == 404
    assert call("POST", "/v1/datasets", json=spec, key="rival").status_code == 403
    assert call("POST", "/v1/datasets", json={**spec, "name": "mine"}, key="rival").status_code == 400, "it has nothing"
    everybodys = call("POST", "/v1/datasets", json={**spec, "name": "all"}, key="admin").json()
    assert everybodys["rows"]["train"] == 4

    upload = {"file": ("more.jsonl", b'{"prompt": "2 + 2", "completion": "4"}\nno JSON\n')}
    file = call("POST", "/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
    filed = call("POST", "/v1/datasets", json={"name": "filed", "feedback": False, "files": [file], "split": SPLIT})
    assert filed.status_code == 201, filed.text
    assert (filed.json()["rows"]["train"], filed.json()["report"]["faulty_lines"]) == (1, 1)
    assert call("POST", "/v1/datasets", json={"name": "x", "files": [file]}, key="rival").status_code == 404

    suite = {"name": "sums", "scorer": {"type": "exact"}, "jsonl": '{"prompt": "2 + 2?", "expected": "4"}'}
    assert call("POST", "/v1/eval/suites", json=suite).status_code == 201
    both = {"name": "both", "feedback": True, "files": [file], "split": SPLIT, "apart_from": ["sums"]}
    apart = call("POST", "/v1/datasets", json=both).json()
    assert (apart["rows"]["train"], apart["report"]["of_suites"], apart["spec"]["apart_from"]) == (3, 1, ["sums"])
    error = error_of(call("POST", "/v1/datasets", json={**both, "apart_from": ["sums@7"]}), 404)
    assert error["param"] == "apart_from"
    assert call("DELETE", "/v1/datasets/both").status_code == 200

    assert call("DELETE", f"/v1/request_log/{answers[2]['id']}").status_code == 200
    assert call("GET", "/v1/datasets/thumbs@1").json()["rows"]["train"] == 2, "a data set has no erased request"
    assert call("GET", "/v1/datasets/all@1", key="admin").json()["rows"]["train"] == 3
    erased = call("DELETE", "/v1/users/bob").json()
    assert erased["requests"] == 1
    assert erased["datasets"] == {"all@1": 1, "thumbs@1": 1}
    after = call("GET", "/v1/datasets/thumbs@1").json()
    assert (after["rows"]["train"], [one["rows"] for one in after["recuts"]]) == (1, [1, 1])
    assert after["digest"] != made.json()["digest"]
    erased = call("DELETE", "/v1/users/judge", key="admin").json()
    assert erased["feedback"] == 3
    assert call("GET", "/v1/datasets/all", key="admin").json()["rows"]["train"] == 1, "that of another key"
    for one in ("bob", "judge", "eve"):
        assert f"zebra of {one}".encode() not in everywhere(raw, store, tmp_path / "spool")
        assert one == "eve" or f'"{one}"'.encode() not in everywhere(raw, store, tmp_path / "spool")
    assert call("DELETE", "/v1/datasets/thumbs").json()["versions"] == [1]
    assert call("GET", "/v1/datasets/thumbs").status_code == 404


async def test_unfinished_jobs_lose_the_rows_of_the_erased(
    gateway: Gateway,
    log: RequestLog,
    raw: redis.Redis,
    store: ObjectStore,
    queue: JobQueue,
    consumers: Consumers,
    tmp_path: Path,
) -> None:
    """Whether they wait, wait for another attempt, run or publish; jobs on other rows go on."""
    running, keys, call = calls(gateway, opened=open_stores)
    asked = {user: [{"role": "user", "content": f"zebra of {user}"}] for user in ("ann", "bob", "eve")}
    ids = {user: ask(running, keys, key="trainer", user=user, messages=asked[user])["id"] for user in asked}
    logged(log, 3)
    kept = {"name": "kept", "logged": True, "feedback": False, "split": SPLIT}

    def make(name: str, *users: str) -> None:
        for user in users:
            said = {"completion_id": ids[user], "thumb": "up", "user": user, "label": name}
            assert call("POST", "/v1/feedback", json=said).status_code in (200, 201)
        made = call("POST", "/v1/datasets", json={**kept, "name": name, "logged": False, "feedback": True})
        assert made.status_code == 201, made.text

    def train(dataset: str, **more: Any) -> str:
        body = {"adapter": f"a-{len(raw.keys('temper:job:*'))}", "attach": False, "dataset": dataset, **more}
        job = call("POST", "/v1/train/sft", json=body)
        assert job.status_code == 202, job.text
        return str(job.json()["id"])

    def found(user: str) -> bool:
        return f"zebra of {user}".encode() in everywhere(raw, store, tmp_path / "spool")

    make("without", "eve")
    make("all", "ann", "bob", "eve")
    owner = consumers("trainer")
    states = {}
    for state in ("publishing", "cancelling", "retried", "cancelled"):
        states[state] = train("all@1")
        if state != "cancelled":
            claimed = must_claim(owner)
            assert claimed.id == states[state]
            store.put(f"{checkpoints_of(claimed.id)}00000001-00000002/state.json", b"of ann")
            store.put(f"adapters/{claimed.spec.adapter}/training-hashes/{claimed.id}/grams-000000", b"of ann")
        if state == "publishing":
            publishing = claimed
            assert owner.publishing(claimed)
        if state == "cancelling":
            active = claimed
        if state == "retried":
            owner.requeue(claimed)
    other = train("without@1")
    refused = call("DELETE", "/v1/datasets/all")
    assert (refused.status_code, "cancel it" in refused.text) == (409, True)

    erased = call("DELETE", "/v1/users/ann").json()
    assert erased["datasets"] == {"all@1": 1}
    ends = {**{state: state for state in states}, "retried": "cancelled"}
    assert erased["jobs"] == {states[state]: end for state, end in ends.items()}
    assert call("DELETE", "/v1/users/ann").json()["jobs"] == {
        states[state]: state for state in ("publishing", "cancelling")
    }, "it tells what has not ended yet"
    for state in ("cancelled", "retried"):
        job = call("GET", f"/v1/train/jobs/{states[state]}").json()
        assert (job["state"], job["reason"]) == ("cancelled", REASON)
        assert not store.list(checkpoints_of(job["id"]))
        assert not store.list(f"adapters/{job['adapter']}/training-hashes/{job['id']}/")
    assert raw.hget(TRAINING.job_key(active.id), "spec") is None, "before its owner hears of it"
    assert owner.heartbeat(active)
    owner.cancelled(active)
    assert (await queue.get(active.id)).reason == REASON
    assert found("ann"), "of the version that is published all the same"
    owner.succeed(publishing, "a-0@1")
    assert not found("ann")
    assert found("bob")

    byid = train("all@1")
    waiting = must_claim(owner)  # the job that has nothing of it, first in the queue
    assert waiting.id == other
    taken = must_claim(owner)
    assert taken.id == byid
    assert call("DELETE", f"/v1/request_log/{ids['bob']}").json()["jobs"] == {byid: "cancelling"}
    silence(raw)
    heir = consumers("another")
    assert must_claim(heir).id == other
    assert heir.claim(0) is None, "its owner has died, and nobody begins it again"
    assert (await queue.get(byid)).state is JobState.CANCELLED
    assert not found("bob")


def built(*users: str) -> Built:
    rows = [Row(source="logged", user=user, messages=[{"role": "user", "content": user}]) for user in users]
    return Built({"train": rows, "validation": [], "held_out": rows[:1]}, DatasetReport(), [])


SPEC = DatasetSpec(logged=True)
ANN = frozenset((user_mark("ann", None),))


def test_from_the_command_line(
    gateway: Gateway, log: RequestLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running, keys = gateway()
    monkeypatch.setenv("TEMPER_API_KEY", keys.secrets["admin"])
    answers = [ask(running, keys, messages=[{"role": "user", "content": f"{number}?"}]) for number in range(3)]
    logged(log, 3)

    def temper(*words: str) -> str:
        result = run_temper(*words, url=running.url)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "thumb down" in temper("feedback", "give", answers[0]["id"], "--down", "--user", "ann")
    temper("feedback", "give", answers[1]["id"], "--correct", "right")
    split = ("--set", "split.validation=0", "--set", "split.held_out=0")
    assert "rated would have  2 train" in temper("dataset", "create", "rated", "--dry-run", *split)
    assert "rated@" not in temper("dataset", "list")
    assert "rated@1  2 train" in temper("dataset", "create", "rated", *split)
    assert "rated@1" in temper("dataset", "list")
    assert "-1.00" in temper("dataset", "show", "rated")
    file = tmp_path / "train.jsonl"
    assert "3 examples: temper train submit kto" in temper("dataset", "examples", "rated@1", "kto", str(file))
    KtoJob.model_validate({"adapter": "a", "examples": [json.loads(line) for line in file.read_text().splitlines()]})
    assert "is removed: 1" in temper("dataset", "delete", "rated")


def test_numbers_are_never_used_again(store: ObjectStore) -> None:
    datasets = DatasetStore(store)
    first = datasets.create(NewDataset("a", SPEC), built("ann"))
    second = datasets.create(NewDataset("a", SPEC), built("ann", "bob"))
    datasets.delete(second)
    third = datasets.create(NewDataset("a", SPEC), built("ann", "bob"))
    assert [one.ref for one in (first, second, third)] == ["a@1", "a@2", "a@3"]
    assert [row.user for row in datasets.rows(third, "train", 1)] == ["bob"]
    with pytest.raises(NotFound):
        datasets.get("a", 2)
    assert datasets.newest() == [("a", 3)]


def test_an_erasure_that_died_is_finished_by_the_next(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it dies, a reader finds either all rows or none of the user's, and nothing is left once it is done."""
    for dies_at in range(1, 12):
        datasets = DatasetStore(store)
        name = f"d{dies_at}"
        datasets.create(NewDataset(name, SPEC), built("ann", "bob", "eve"))
        writes = 0
        put, delete = store.put, store.delete

        def count() -> None:
            nonlocal writes
            writes += 1
            if writes == dies_at:  # noqa: B023
                raise Unavailable("died")

        def counted_put(*args: Any, **options: Any) -> Any:
            count()
            return put(*args, **options)  # noqa: B023

        def counted_delete(*args: Any, **options: Any) -> Any:
            count()
            return delete(*args, **options)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(store, "put", counted_put)
            patched.setattr(store, "delete", counted_delete)
            try:
                datasets.cut_out(name, 1, ANN)
                died = False
            except Unavailable:
                died = True
        lock = f"datasets/{name}/00000001/lock"
        if store.head(lock) is not None:
            with pytest.raises(Unavailable, match="changed by somebody else"):
                datasets.cut_out(name, 1, ANN)
            monkeypatch.setattr(versioned_objects, "_LOCK_SECONDS", 0.0)
        users = [row.user for row in datasets.rows(datasets.get(name), "train")]
        assert users in (["ann", "bob", "eve"], ["bob", "eve"])
        datasets.cut_out(name, 1, ANN)
        assert [row.user for row in datasets.rows(datasets.get(name), "train")] == ["bob", "eve"]
        assert not any(b"ann" in store.get(key).data for key in store.list(f"datasets/{name}/"))
        if not died:
            break
    assert not died
    assert dies_at > 3


@pytest.mark.parametrize("ahead", [-1e9, 1e9])
def test_a_lock_is_held_by_the_clock_of_the_store(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Whatever the clock of who has it, and of who wants it."""
    datasets = DatasetStore(store)
    datasets.create(NewDataset("a", SPEC), built("ann", "bob"))
    store.put("datasets/a/00000001/lock", b"%.3f somebody" % (time.time() + ahead))
    with pytest.raises(Unavailable, match="changed by somebody else") as refused:
        datasets.cut_out("a", 1, ANN)
    assert 1.0 <= refused.value.retry_after <= versioned_objects._LOCK_SECONDS
    monkeypatch.setattr(versioned_objects, "_LOCK_SECONDS", 0.0)
    assert datasets.cut_out("a", 1, ANN) > 0


def test_a_user_erased_while_a_data_set_is_made_is_not_in_it(
    store: ObjectStore, log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = DatasetMaker(DatasetStore(store), log, SuiteStore(store))
    create = maker.store.create

    def erased_meanwhile(*args: Any) -> Any:
        log.erase_user("ann", None)
        assert maker.store.erase(user_mark("ann", None)) == {}
        return create(*args)

    monkeypatch.setattr(maker, "build", lambda *_: built("ann", "bob"))
    monkeypatch.setattr(maker.store, "create", erased_meanwhile)
    manifest, _ = maker.make(NewDataset("a", SPEC), [], {}, None)
    assert [row.user for row in maker.store.rows(manifest, "train")] == ["bob"]
    assert manifest.recuts[0].at <= time.time()


@pytest.mark.parametrize("session", ["walk", None])
def test_a_conversation_with_a_gateway_is_a_trajectory(gateway: Gateway, log: RequestLog, session: str | None) -> None:
    """Rated by its session, or without one by its answers."""
    running, keys, call = calls(gateway, api_keys_poll_seconds=0.05)
    turns = [{"role": "user", "content": "zebra"}]
    answers = []
    for _ in range(2):
        answer = ask(running, keys, key="trainer", messages=turns, session_id=session)
        turns = [*turns, answer["choices"][0]["message"], {"role": "user", "content": "and on"}]
        answers.append(answer["id"])
    logged(log, 2)
    whole = {"completion_ids": answers} if session is None else {"session_id": session}
    for said in ({**whole, "score": 0.5}, {"completion_id": answers[0], "thumb": "down"}):
        assert call("POST", "/v1/feedback", json=said).status_code == 201
    spec = {"name": "walks", "trajectories": True, "split": SPLIT}
    made = call("POST", "/v1/datasets", json=spec)
    assert made.status_code == 201, made.text
    assert (made.json()["rows"]["train"], made.json()["report"]["no_trajectory"]) == (1, 0)
    (row,) = call("GET", "/v1/datasets/walks/rows").json()["data"]
    found = Trajectory.model_validate(row["trajectory"])
    assert ([one.reward for one in found.actions], found.reward) == ([-1.0, None], 0.5)
    assert row["turn_ids"] == answers
    about_the_second = call("GET", "/v1/feedback", params={"answer": answers[1]}).json()["data"]
    assert [one["completion_ids"] for one in about_the_second] == ([answers] if session is None else [])
    assert all(one.logprobs is not None for one in found.actions)
