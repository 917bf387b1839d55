"""Merging, rolling back and pruning over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.jobs import JobState, MergeJob
from tests.unit.gateway.api.adapters.test_adapters import config, upload, weights
from tests.unit.gateway.conftest import MODEL, Running


def versions(http: httpx.Client, name: str, count: int) -> None:
    for number in range(count):
        answer = upload(http, name, {WEIGHTS: weights(float(number)), CONFIG: config()})
        assert answer.status_code == 201, answer.text


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def finish_all(running: Running) -> None:
    for job in running.queue.jobs.values():
        running.queue.jobs[job.id] = job.model_copy(update={"state": JobState.SUCCEEDED})


def test_merge_pins_its_sources(running: Running, http: httpx.Client) -> None:
    versions(http, "a", 2)
    versions(http, "b", 1)
    body = {
        "sources": [{"adapter": "a@1", "weight": 0.7}, {"adapter": "b"}],
        "method": "ties",
        "rank": 8,
        "density": 0.2,
        "seed": 3,
    }
    headers = {"idempotency-key": "merge-1"}
    answer = http.post("/v1/adapters/out/merge", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["kind"], job["adapter"], job["state"]) == ("merge", "out", "queued")
    assert answer.headers["location"] == f"/v1/train/jobs/{job['id']}"
    spec = running.queue.specs[job["id"]]
    assert isinstance(spec, MergeJob)
    assert [(source.adapter, source.weight) for source in spec.sources] == [("a@1", 0.7), ("b@1", 1.0)]
    assert (spec.method, spec.rank, spec.density, spec.seed, spec.attach) == ("ties", 8, 0.2, 3, False)
    versions(http, "b", 1)  # b means another version by now, and the same request still the same job
    assert http.post("/v1/adapters/out/merge", json=body, headers=headers).json()["id"] == job["id"]
    refusal(http.post("/v1/adapters/out/merge", json={**body, "seed": 4}, headers=headers), 409)
    finish_all(running)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"sources": []}, 400, "sources"),
        ({"sources": [{"adapter": "nobody"}]}, 404, "sources[0].adapter"),
        ({"sources": [{"adapter": "a@1"}, {"adapter": "a@9"}]}, 404, "sources[1].adapter"),
        ({"sources": [{"adapter": "a@1"}, {"adapter": "a"}]}, 400, "sources"),
        ({"sources": [{"adapter": "a", "weight": 0}]}, 400, "sources[0]"),
        ({"sources": [{"adapter": "a", "weight": 1e9}]}, 400, "sources[0].weight"),
        ({"sources": [{"adapter": "../a"}]}, 400, "sources[0].adapter"),
        ({"method": "mean"}, 400, "method"),
        ({"method": "svd"}, 400, "rank"),
        ({"method": "ties", "rank": 4}, 400, "density"),
        ({"rank": 17}, 400, "rank"),
        ({"densty": 1}, 400, "densty"),
    ],
)
def test_merges_that_are_refused(
    running: Running, http: httpx.Client, change: dict[str, Any], status: int, param: str
) -> None:
    versions(http, "a", 1)
    jobs = len(running.queue.jobs)
    body = {"sources": [{"adapter": "a@1"}], **change}
    assert refusal(http.post("/v1/adapters/out/merge", json=body), status)["param"] == param
    assert len(running.queue.jobs) == jobs


def test_merges_of_another_base_or_into_its_name_are_refused(running: Running, http: httpx.Client) -> None:
    versions(http, "a", 1)
    running.registry.publish("alien", {WEIGHTS: weights(), CONFIG: config()}, base_digest="e" * 64)
    body = {"sources": [{"adapter": "a"}, {"adapter": "alien"}]}
    error = refusal(http.post("/v1/adapters/out/merge", json=body), 422)
    assert error["param"] == "sources[1].adapter"
    assert "eeeeeeeeeeee" in error["message"]
    refusal(http.post(f"/v1/adapters/{MODEL}/merge", json={"sources": [{"adapter": "a"}]}))


def test_rollback(running: Running, http: httpx.Client) -> None:
    refusal(http.post("/v1/adapters/a/rollback"), 404)
    versions(http, "a", 3)
    http.post("/v1/adapters/a/attach")
    syncs, told = running.engine.syncs, len(running.webhooks.told)
    answer = http.post("/v1/adapters/a/rollback").json()
    newest = {change.type: change.data for change in running.webhooks.told[told:]}
    assert newest["adapter.rolled_back"] == {"adapter": "a", "from": "a@3", "to": "a@2"}
    assert newest["adapter.attached"] == {"adapter": "a@2", "before": "a@3", "model": MODEL}
    assert (answer["before"], answer["current"], answer["attached"]) == ("a@3", "a@2", "a@2")
    assert running.engine.syncs > syncs, "the engines are told"
    assert http.get("/v1/adapters/a").json()["current"] == 2
    answer = http.post("/v1/adapters/a/rollback", json={"version": 1}).json()
    assert [(move["from"], move["to"]) for move in answer["moves"]] == [(3, 2), (2, 1)]
    refusal(http.post("/v1/adapters/a/rollback"), 409)
    refusal(http.post("/v1/adapters/a/rollback", json={"version": 7}), 404)
    assert refusal(http.post("/v1/adapters/a/rollback", json={"to": 1}))["param"] == "to"


def test_a_rollback_whose_gateway_died_is_not_made_twice(running: Running, http: httpx.Client) -> None:
    """It had moved the pointer, and kept no answer under the key."""
    versions(http, "a", 4)
    key = {"idempotency-key": "back"}
    answers = []
    for _ in range(3):
        answers.append(http.post("/v1/adapters/a/rollback", headers=key).json())
        running.records.kept.clear()
    assert [(answer["before"], answer["current"]) for answer in answers] == [("a@4", "a@3")] * 3
    assert http.get("/v1/adapters/a").json()["current"] == 3
    assert http.post("/v1/adapters/a/rollback", headers={"idempotency-key": "again"}).json()["current"] == "a@2"


def test_prune(running: Running, http: httpx.Client) -> None:
    finish_all(running)
    versions(http, "a", 6)
    http.post("/v1/adapters/a/attach", json={"version": 2})
    job = {"adapter": "b", "start_from": "a@3", "examples": [{"prompt": "2+2", "completion": "4"}]}
    assert http.post("/v1/train/sft", json=job).status_code == 202
    plan = http.post("/v1/adapters/a/prune", json={"keep": 1, "dry_run": True}).json()
    assert plan["removed"] == ["a@1", "a@4", "a@5"]
    assert plan["kept"] == [
        {"version": "a@2", "reason": "attached"},
        {"version": "a@3", "reason": "an unfinished job needs it"},
        {"version": "a@6", "reason": "among the newest 1"},
    ]
    assert len(http.get("/v1/adapters/a/versions").json()["data"]) == 6
    done = http.post("/v1/adapters/a/prune", json={"keep": 1}).json()
    assert (done["removed"], done["kept"], done["freed_bytes"]) == (plan["removed"], plan["kept"], plan["freed_bytes"])
    assert [one["version"] for one in http.get("/v1/adapters/a/versions").json()["data"]] == [2, 3, 6]
    assert http.get("/v1/adapters/a/download", params={"version": 4}).status_code == 404
    assert running.registry.current("a") == AdapterVersion("a", 6)
    finish_all(running)


def test_prunes_that_are_refused(running: Running, http: httpx.Client) -> None:
    versions(http, "a", 2)
    assert refusal(http.post("/v1/adapters/a/prune", json={}))["param"] == "keep"
    assert refusal(http.post("/v1/adapters/a/prune", json={"keep": 0}))["param"] == "keep"
    assert refusal(http.post("/v1/adapters/a/prune", json={"days": -1}))["param"] == "days"
    refusal(http.post("/v1/adapters/nobody/prune", json={"keep": 1}), 404)
    running.queue.down = True
    refusal(http.post("/v1/adapters/a/prune", json={"keep": 1}), 503)
    assert len(http.get("/v1/adapters/a/versions").json()["data"]) == 2, "nobody knows what jobs need"
