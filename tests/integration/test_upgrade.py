"""Data that an earlier release really wrote, read by this one; and data of a later release, refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cli.local.ports import claim_ports
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import NewerSchema
from services.common.jobs.training_sessions.names import checkpoint_key
from services.common.queue.consumer import JobConsumer
from services.common.queue.job_queue import JobQueue
from services.common.queue.records import SPEC, job_id_of_entry, spec_json
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.core.file_store import FileStore
from services.trainer.runtime.checkpoint import CheckpointStore
from tests.e2e.jobs import losses, wait_for_end
from tests.e2e.test_sessions import Client as Session
from tests.fixtures.upgrade import HERE, RELEASES, UNRELEASED, answer_of, facts, load
from tests.integration.jobs import RECLAIM, silence
from tests.integration.servers import RunningServer
from tests.stack import ROOT, TINY, clean_environment


@dataclass(frozen=True, slots=True)
class Upgraded:
    """This release on the stores of another one."""

    client: httpx.Client
    facts: dict[str, Any]

    def get(self, path: str) -> dict[str, Any]:
        response = self.client.get(path)
        assert response.status_code == 200, response.text
        return dict(response.json())


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, settings: CommonSettings, valkey: RunningServer, store: ObjectStore) -> str:
    load(request.param, settings.redis_url.get_secret_value(), store)
    return str(request.param)


@pytest.fixture
def upgraded(release: str, settings: CommonSettings, tmp_path: Path) -> Iterator[Upgraded]:
    grpc_port, http_port = claims = claim_ports(2)
    env = {
        "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": settings.s3_endpoint,
        "TEMPER_S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
        "TEMPER_S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
        "TEMPER_S3_BUCKET": settings.s3_bucket,
        "TEMPER_MODEL": str(TINY),
        "TEMPER_DTYPE": "float32",
        "TEMPER_GRPC_PORT": str(grpc_port.number),
        "TEMPER_PORT": str(http_port.number),
        "TEMPER_ENGINES": f"127.0.0.1:{grpc_port.number}",
        "TEMPER_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "TEMPER_EXIT_WITH_PARENT": "true",
        "TEMPER_REQUEST_LOG": "true",
        "TEMPER_REQUEST_LOG_SPOOL": str(tmp_path / "spool"),
        # Fixtures get old.
        "TEMPER_REQUEST_LOG_TTL_SECONDS": str(2**31),
    }
    url = f"http://127.0.0.1:{http_port.number}"
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))
        for module in ("services.pod", "services.gateway"):
            process = subprocess.Popen(
                [sys.executable, "-m", module], env=clean_environment(env), cwd=ROOT, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
        wait_until_ready(client, tmp_path / "log")
        yield Upgraded(client, facts(release))
    for claim in claims:
        claim.release()


def wait_until_ready(client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(log.read_text(errors="replace")[-3000:])


@pytest.mark.parametrize(
    "release",
    [pytest.param(name, marks=[pytest.mark.thorough] if name == UNRELEASED else []) for name in RELEASES],
    indirect=True,
)
def test_everything_is_read(upgraded: Upgraded, raw: redis.Redis, store: ObjectStore) -> None:
    known = upgraded.facts
    documents_are_there(upgraded, known)
    adapters_are_served(upgraded, known)
    a_finished_job_is_there(upgraded, known)
    files_and_batches_are_there(upgraded, known)
    a_response_is_there(upgraded, known)
    a_session_goes_on(upgraded, store)
    work_goes_on(upgraded, known)
    a_later_release_is_named(upgraded, known, raw, store)


def a_later_release_is_named(upgraded: Upgraded, known: dict[str, Any], raw: redis.Redis, store: ObjectStore) -> None:
    """Over HTTP: 503, which document it is, what this release reads, and the way out; nothing is changed."""
    client, (response,) = upgraded.client, list(raw.scan_iter("temper:response:*resp_*", count=1000))[:1]
    hashes = {
        f"temper:job:{known['finished_job']}": [("GET", f"/v1/train/jobs/{known['finished_job']}")],
        f"temper:job:{known['queued_job']}": [("POST", f"/v1/train/jobs/{known['queued_job']}/cancel")],
        f"temper:batch:{known['finished_batch']}": [("GET", f"/v1/batches/{known['finished_batch']}")],
        str(response): [("GET", f"/v1/responses/{str(response).rpartition(':')[2]}")],
    }
    for key, calls in hashes.items():
        raw.hset(key, "schema", "9")
        before = raw.hgetall(key)
        for method, path in calls:
            is_refused(client.request(method, path), key.rpartition(":")[2])
        assert raw.hgetall(key) == before
    file = next(key for key in store.list("files/") if key.endswith(f"{known['input_file']}/file.json"))
    objects = {
        "adapters/polite/versions/00000002/manifest.json": ("polite@2", "DELETE", "/v1/adapters/polite"),
        file: (known["input_file"], "DELETE", f"/v1/files/{known['input_file']}"),
    }
    for key, (named, method, path) in objects.items():
        later = json.dumps({**json.loads(store.get(key).data), "schema": 9}).encode()
        store.put(key, later)
        is_refused(client.request(method, path), named)
        assert store.get(key).data == later


def is_refused(answer: httpx.Response, named: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "newer_schema"), answer.text
    assert named in error["message"]
    assert "has schema 9 of" in error["message"]
    assert "by a later release; upgrade this service, engines before gateways" in error["message"]


def documents_are_there(upgraded: Upgraded, known: dict[str, Any]) -> None:
    """What the release answered is answered now; v0.1 has not written it down."""
    for path, answered in known.get("answers", {}).items():
        assert said_of(answered, answer_of(upgraded.client, path)) == answered, path


def said_of(answered: Any, now: Any) -> Any:
    """An answer without the fields that an earlier one did not have."""
    if isinstance(answered, dict) and isinstance(now, dict):
        return {name: said_of(answered[name], value) for name, value in now.items() if name in answered}
    if isinstance(answered, list) and isinstance(now, list) and len(answered) == len(now):
        return [said_of(before, after) for before, after in zip(answered, now, strict=True)]
    return now


def a_session_goes_on(upgraded: Upgraded, store: ObjectStore) -> None:
    """From a checkpoint of v0.1: with its weights, AdamW's moments and its count of steps; without them it learns
    otherwise."""
    directory = HERE / "v0.1-sessions"
    known = json.loads((directory / "session.json").read_text())
    key = checkpoint_key(known["checkpoint"])
    store.put(key, (directory / "s3" / key).read_bytes())
    kept, fresh = (
        losses_of_session(upgraded.client, known, {"checkpoint": known["checkpoint"], **how})
        for how in ({}, {"fresh_optimizer": True})
    )
    assert kept == pytest.approx(known["losses_behind_it"], rel=1e-4)
    assert fresh[0] == pytest.approx(kept[0], rel=1e-4)
    assert fresh[1] != pytest.approx(kept[1], rel=1e-3)


def losses_of_session(client: httpx.Client, known: dict[str, Any], begun: dict[str, Any]) -> list[float]:
    """Losses of a new session before a step and behind it."""
    session = Session(client, **begun)
    forward = {"loss": "cross_entropy", "data": known["data"]}
    losses = [session.run("forward_backward", **forward)["loss"]]
    session.run("optim_step", **known["step"])
    losses.append(session.run("forward_backward", **forward)["loss"])
    assert client.delete(f"/v1/train/sessions/{session.id}").status_code == 200
    return losses


def adapters_are_served(upgraded: Upgraded, known: dict[str, Any]) -> None:
    versions = upgraded.get("/v1/adapters/polite/versions")["data"]
    assert [version["version"] for version in versions] == [1, 2]
    named = upgraded.client.post("/v1/chat/completions", json=known["chat_request"])
    assert named.status_code == 200, named.text
    assert named.json()["choices"][0]["message"]["content"] == known["chat_text"]
    plain = upgraded.client.post("/v1/chat/completions", json={**known["chat_request"], "model": "qwen3.5"})
    assert plain.headers["x-temper-adapter"] == known["attached"]
    # Its answer was kept under the key: it is not rolled back a second time.
    again = upgraded.client.post("/v1/adapters/polite/rollback", headers={"Idempotency-Key": "rollback-1"})
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == known["rollback"]


def a_finished_job_is_there(upgraded: Upgraded, known: dict[str, Any]) -> None:
    job = upgraded.get(f"/v1/train/jobs/{known['finished_job']}")
    assert (job["state"], job["result_adapter"]) == ("succeeded", "polite@1")
    assert upgraded.get(f"/v1/train/jobs/{known['cancelled_job']}")["state"] == "cancelled"
    assert [step for step, _ in losses(upgraded.client, known["finished_job"])] == [1, 2]
    key = {"Idempotency-Key": known["finished_key"]}
    same = upgraded.client.post("/v1/train/sft", json=known["finished_request"], headers=key)
    assert same.json()["id"] == known["finished_job"]
    other = upgraded.client.post("/v1/train/sft", json={**known["finished_request"], "epochs": 9}, headers=key)
    assert other.status_code == 409
    assert known["finished_job"] in {listed["id"] for listed in upgraded.get("/v1/train/jobs")["data"]}


def files_and_batches_are_there(upgraded: Upgraded, known: dict[str, Any]) -> None:
    assert upgraded.get(f"/v1/files/{known['input_file']}")["purpose"] == "batch"
    assert upgraded.client.get(f"/v1/files/{known['output_file']}/content").text == known["output"]
    batch = upgraded.get(f"/v1/batches/{known['finished_batch']}")
    assert (batch["status"], batch["output_file_id"]) == ("completed", known["output_file"])
    key = {"Idempotency-Key": "batch-1"}
    same = upgraded.client.post("/v1/batches", json=known["batch_request"], headers=key)
    assert same.json()["id"] == known["finished_batch"]


def a_response_is_there(upgraded: Upgraded, known: dict[str, Any]) -> None:
    response = known["response"]
    assert upgraded.get(f"/v1/responses/{response['id']}") == response
    more = {"model": "qwen3.5", "input": "And then?", "previous_response_id": response["id"], "max_output_tokens": 4}
    assert upgraded.client.post("/v1/responses", json=more).status_code == 200


def work_goes_on(upgraded: Upgraded, known: dict[str, Any]) -> None:
    client = upgraded.client
    resumed = wait_for_end(client, known["running_job"])
    assert (resumed["state"], resumed["result_adapter"], resumed["attempts"]) == ("succeeded", "resumed@1", 2)
    steps = [step for step, _ in losses(client, known["running_job"])]
    back = next(place for place, (before, after) in enumerate(itertools.pairwise(steps)) if after <= before)
    assert steps[back + 1 :] == list(range(9, 25)), f"its newest checkpoint is the one after step 8: {steps}"
    for job_id in (known["queued_job"], job_id_of_entry(known["pipeline_entry"])):
        assert wait_for_end(client, job_id)["state"] == "succeeded"
    deadline = time.monotonic() + 60
    while (batch := upgraded.get(f"/v1/batches/{known['running_batch']}"))["status"] not in ("completed", "expired"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    # What it had to do within a day of its creation; the fixture is older as a rule.
    assert (batch["status"] == "expired") == (batch["expires_at"] < time.time())


def test_a_spec_is_written_as_it_was(release: str, raw: redis.Redis) -> None:
    """A field that is new has to be left out of a spec's JSON at its default: idempotency keys stand for that text."""
    checked = 0
    for key in raw.scan_iter("temper:job:*"):
        if raw.type(key) == "hash" and (text := raw.hget(key, "spec")) is not None:
            assert spec_json(SPEC.validate_json(str(text))) == text
            checked += 1
    assert checked


async def test_a_job_of_a_later_release_is_left_to_it(release: str, settings: CommonSettings, raw: redis.Redis) -> None:
    known = facts(release)
    queued, running = known["queued_job"], known["running_job"]
    raw.hset(f"temper:job:{queued}", "schema", "2")
    queue = JobQueue(settings)
    with pytest.raises(NewerSchema, match=f"job {queued} has schema 2 of jobs, and this release knows up to 1"):
        await queue.get(queued)
    await queue.aclose()
    consumer = JobConsumer(settings, owner="old", reclaim_seconds=RECLAIM)
    claimed = [found.id for _ in range(3) if (found := consumer.claim(0.05)) is not None]
    assert claimed == [running, job_id_of_entry(known["pipeline_entry"])]
    assert raw.hget(f"temper:job:{queued}", "state") == "queued"
    raw.hset(f"temper:job:{queued}", "schema", "1")
    silence(raw)
    newer = JobConsumer(settings, owner="new", reclaim_seconds=RECLAIM)
    found = newer.claim(0.05)
    taken = set()
    while found is not None:
        taken.add(found.id)
        found = newer.claim(0.05)
    assert queued in taken
    for one in (consumer, newer):
        one.close()


def test_objects_of_a_later_release_are_refused(
    release: str, store: ObjectStore, registry: AdapterRegistry, tmp_path: Path
) -> None:
    known = facts(release)

    def later(key: str) -> None:
        store.put(key, json.dumps({**json.loads(store.get(key).data), "schema": 2}).encode())

    later("adapters/polite/versions/00000002/manifest.json")
    with pytest.raises(NewerSchema, match="the manifest of polite@2 has schema 2 of adapter manifests"):
        registry.manifest(AdapterVersion("polite", 2))
    later("adapters/polite/CURRENT")
    with pytest.raises(NewerSchema, match="adapters/polite/CURRENT has schema 2 of adapter pointers"):
        registry.current("polite")
    later("attached/qwen3.5")
    with pytest.raises(NewerSchema, match=r"attached/qwen3\.5"):
        registry.attached()
    file = next(key for key in store.list("files/") if key.endswith(f"{known['input_file']}/file.json"))
    later(file)
    with pytest.raises(NewerSchema, match="schema 2 of files"):
        FileStore(store).get("anonymous", known["input_file"])
    for key in store.list(f"jobs/{known['running_job']}/"):
        if key.endswith("manifest.json"):
            later(key)
    with pytest.raises(NewerSchema, match="the checkpoint after step 8 has schema 2 of job checkpoints"):
        CheckpointStore(store, tmp_path).newest(known["running_job"], "any")


def test_what_is_written_has_its_number(store: ObjectStore, registry: AdapterRegistry) -> None:
    files = {"adapter_model.safetensors": b"weights", "adapter_config.json": b'{"r": 1}'}
    manifest = registry.publish("stamped", files, base_digest="base", job_id="job-1")
    registry.attach(manifest.ref)
    registry.set_current(manifest.ref)
    written = [key for key in store.list("") if key.endswith(("manifest.json", "CURRENT", "job-1"))]
    assert len(written) == 3
    for key in [*written, "attached/qwen3.5"]:
        assert json.loads(store.get(key).data)["schema"] == 1, key
