"""/v1/evaluations: what cannot run is refused by its field, names become versions, results are read by their owner."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.adapters.names import AdapterVersion
from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, RunSuite, RunTarget, Shard
from services.common.evaluation.runs.results import result_of
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs import EvalJob, SftJob
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.api.evaluation.test_suites import suite
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of


def publish(running: Running, name: str = "polite") -> None:
    digest = running.inference.engines.served.info.digest
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    running.registry.publish(name, files, base_digest=digest)


def stored(running: Running, run: str, key_id: str = "") -> None:
    """A run of two items as its runner leaves it: the second target is better on one of them."""
    runs = EvaluationStore(running.store)  # type: ignore[arg-type]
    record = RunRecord(
        id=run,
        suites=(
            RunSuite(suite="sums@1", digest="d", items=2, scorer="exact", better="higher", sampling=SuiteSampling()),
        ),
        targets=(RunTarget(name="base"), RunTarget(name="polite@1", digest="p")),
        seed=0,
        base_digest="b",
        key_id=key_id,
        created_at=1.0,
    )
    runs.begin(record, [])
    found = {}
    for target in range(2):
        results = tuple(
            ItemResult(
                item=str(index),
                index=index,
                score=float(index <= target),
                weight=1.0,
                answers=(Answer(text="3", score=float(index <= target), tokens=2),),
            )
            for index in range(2)
        )
        runs.write_shard(run, 0, target, 0, Shard(results=results))
        found[0, target] = results
    runs.finish(result_of(record, found, 2.0))


def test_a_run_is_queued_with_versions_in_place_of_names(running: Running, http: httpx.Client) -> None:
    publish(running)
    assert http.post("/v1/eval/suites", json=suite()).status_code == 201
    body = {"suites": ["sums"], "targets": ["base", "polite"], "sampling": {"max_tokens": 4}}
    headers = {"idempotency-key": "evaluate-once"}
    answer = http.post("/v1/evaluations", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    made = answer.json()
    assert (made["object"], made["state"]) == ("evaluation", "queued")
    assert answer.headers["location"] == f"/v1/evaluations/{made['id']}"
    assert http.post("/v1/evaluations", json=body, headers=headers).json()["id"] == made["id"]
    spec = running.queue.specs[made["id"]]
    assert isinstance(spec, EvalJob)
    assert (spec.suites, spec.targets) == (["sums@1"], ["base", "polite@1"])
    assert http.get(f"/v1/evaluations/{made['id']}").json()["summaries"] is None
    assert "has not begun" in error_of(http.get(f"/v1/evaluations/{made['id']}/items"), 404)["message"]
    assert [one["id"] for one in http.get("/v1/evaluations").json()["data"]] == [made["id"]]


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"suites": ["sums", "products"]}, 404, "suites[1]"),
        ({"suites": ["sums@7"]}, 404, "suites[0]"),
        ({"targets": ["base", "nobody@1"]}, 404, "targets[1]"),
        ({"targets": ["base", "base"]}, 400, "targets"),
        ({"suites": ["sums", "sums@1"]}, 400, "suites"),
        ({"sampling": {"samples": 4}}, 400, "sampling"),
        ({"targets": [{"url": "file:///etc/passwd", "model": "m"}]}, 400, "targets"),
        ({"suites": ["likely"], "targets": [{"url": "http://there/v1", "model": "m"}]}, 400, "suites[0]"),
        ({"suites": []}, 400, "suites"),
    ],
)
def test_what_cannot_run_is_refused_by_its_field(
    http: httpx.Client, changes: dict[str, Any], status: int, field: str
) -> None:
    http.post("/v1/eval/suites", json=suite())
    http.post("/v1/eval/suites", json=suite("likely", scorer={"type": "perplexity"}))
    error = error_of(http.post("/v1/evaluations", json={"suites": ["sums"], **changes}), status)
    assert str(error["param"]).startswith(field), error


def test_a_result_outlives_its_job_and_is_read_by_item(running: Running, http: httpx.Client) -> None:
    stored(running, "run-of-two")
    found = http.get("/v1/evaluations/run-of-two").json()
    assert (found["state"], found["targets"][1]["name"]) == ("succeeded", "polite@1")
    assert [one["mean"] for one in found["summaries"]] == [0.5, 1.0]
    (pair,) = found["comparisons"]
    assert (pair["gain"], pair["better"], pair["worse"], pair["p"]) == (0.5, 1, 0, 1.0)
    page = http.get("/v1/evaluations/run-of-two/items", params={"target": "polite@1", "limit": 1}).json()
    assert (page["target"], page["data"][0]["score"], page["has_more"], page["total"]) == ("polite@1", 1.0, True, 2)
    page = http.get("/v1/evaluations/run-of-two/items", params={"after": 0}).json()
    assert [(one["index"], one["answers"][0]["text"]) for one in page["data"]] == [(1, "3")]
    assert (
        "base, polite@1"
        in error_of(http.get("/v1/evaluations/run-of-two/items", params={"target": "x"}), 400)["message"]
    )


def test_runs_belong_to_their_key(start: Starter, tmp_path: Any) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("alice", Scope.TRAIN)
    keys.add("bob", Scope.TRAIN)
    keys.add("operator", Scope.ADMIN)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    stored(running, "run-of-two", keys.entries["alice"].id)
    seen = {}
    for name in keys.entries:
        with httpx.Client(base_url=running.url, headers=keys.bearer(name), timeout=PATIENCE, trust_env=False) as caller:
            status = caller.get("/v1/evaluations/run-of-two").status_code
            seen[name] = (status, len(caller.get("/v1/evaluations").json()["data"]))
    assert seen == {"alice": (200, 1), "bob": (404, 0), "operator": (200, 1)}


SFT = {"adapter": "polite", "examples": [{"prompt": "hello", "completion": "Good day!"}]}


def test_a_training_job_waits_with_versions_in_place_of_its_gates_names(running: Running, http: httpx.Client) -> None:
    publish(running)
    assert http.post("/v1/eval/suites", json=suite()).status_code == 201
    gates = {
        "publish_if": {"gain": [{"suite": "sums"}], "against": "polite"},
        "attach_if": {"no_loss": [{"suite": "sums@1", "max_loss": 0.5}]},
    }
    together = gates | {"attach_if": {"gain": [{"suite": "sums"}], "against": "polite*0.5"}}
    spec = running.queue.specs[http.post("/v1/train/sft", json={**SFT, **together}).json()["id"]]
    assert isinstance(spec, SftJob)
    assert spec.attach_if is not None
    assert spec.attach_if.against == "polite@1*0.5"
    answer = http.post("/v1/train/sft", json={**SFT, **gates})
    assert answer.status_code == 202, answer.text
    spec = running.queue.specs[answer.json()["id"]]
    assert isinstance(spec, SftJob)
    assert spec.publish_if is not None
    assert (spec.publish_if.gain[0].suite, spec.publish_if.against) == ("sums@1", "polite@1")
    assert spec.attach_if is not None
    assert (spec.attach_if.no_loss[0].suite, spec.attach_if.against) == ("sums@1", "parent")


@pytest.mark.parametrize(
    ("gate", "status", "field", "words"),
    [
        ({"gain": [{"suite": "nothing"}]}, 404, "publish_if.gain[0].suite", "suite 'nothing' does not exist"),
        ({"gain": [{"suite": "sums"}, {"suite": "sums@7"}]}, 404, "publish_if.gain[1].suite", "sums@7"),
        ({"gain": [{"suite": "sums"}], "against": "nobody@1"}, 404, "publish_if.against", "nobody@1"),
        ({"gain": [{"suite": "sums"}], "against": "base+nobody"}, 400, "publish_if.against", "reserved"),
        ({"gain": [{"suite": "sums"}], "against": "nobody*2+nobody@3"}, 400, "publish_if.against", "named twice"),
        ({"gain": [{"suite": "sums"}], "alpha": 0}, 400, "publish_if.alpha", "0.0001"),
        ({"gain": [{"suite": "sums"}], "alpha": 0.5}, 400, "publish_if.alpha", "0.2"),
        ({"gain": [{"suite": "sums"}], "need": "any"}, 400, "publish_if", "two or more"),
        ({"gain": [{"suite": "sums", "min_gain": 1}]}, 400, "publish_if.gain[0].min_gain", "less than 1"),
        ({"no_loss": [{"suite": "sums", "max_loss": 2}]}, 400, "publish_if.no_loss[0].max_loss", "less than 1"),
        ({"no_loss": [{"suite": "alike", "max_loss": 0.5}]}, 400, "publish_if.no_loss[0].suite", "of one group"),
        ({}, 400, "publish_if", "give a metric, or suites"),
    ],
)
def test_a_gate_that_cannot_decide_is_refused_by_its_field(
    running: Running, http: httpx.Client, gate: dict[str, Any], status: int, field: str, words: str
) -> None:
    jobs = len(running.queue.jobs)
    http.post("/v1/eval/suites", json=suite())
    alike = "\n".join(f'{{"prompt": "{n}?", "expected": "{n}", "group": "g"}}' for n in range(3))
    http.post("/v1/eval/suites", json=suite("alike", jsonl=alike))
    error = error_of(http.post("/v1/train/sft", json={**SFT, "publish_if": gate}), status)
    assert str(error["param"]).startswith(field), error
    assert words in error["message"]
    assert len(running.queue.jobs) == jobs
    refused = error_of(http.post("/v1/train/sft", json={**SFT, "attach": False, "attach_if": gate}), 400)
    assert "attach_if" in refused["message"] or str(refused["param"]).startswith("attach_if")


def test_targets_of_several_runs_stand_side_by_side(running: Running, http: httpx.Client) -> None:
    stored(running, "run-1")
    stored(running, "run-2")
    found = http.get("/v1/evaluations/compare", params={"of": ["run-1", "run-2"]}).json()
    labels = [one["label"] for one in found["entries"]]
    assert labels == ["base (run-1)", "polite@1 (run-1)", "base (run-2)", "polite@1 (run-2)"]
    assert [(one["entry"], one["mean"]) for one in found["data"]] == [(0, 0.5), (1, 1.0), (2, 0.5), (3, 1.0)]
    first, *others = [one["with_first"] for one in found["data"]]
    assert first is None
    assert [(one["first"], one["gain"], one["better"]) for one in others] == [
        ("base (run-1)", gain, better) for gain, better in ((0.5, 1), (0.0, 0), (0.5, 1))
    ]
    one = http.get("/v1/evaluations/compare", params={"of": ["run-1"] * 2, "target": "base"}).json()
    assert len(one["entries"]) == 2
    assert "1 to 8" in error_of(http.get("/v1/evaluations/compare", params={"of": ["run-1"] * 5}), 400)["message"]
    error_of(http.get("/v1/evaluations/compare", params={"of": "nothing"}), 404)
    error_of(http.get("/v1/evaluations/compare", params={"of": "nobody@1"}), 404)
    publish(running)
    assert "no evaluation" in error_of(http.get("/v1/evaluations/compare", params={"of": "polite@1"}), 404)["message"]
    runs = EvaluationStore(running.store)  # type: ignore[arg-type]
    runs.of_version(AdapterVersion("polite", 1)).add("run-2", "")
    version = http.get("/v1/evaluations/compare", params={"of": ["run-1", "polite@1"]}).json()
    assert version["entries"][2] == {
        "label": "polite@1 (run-2)",
        "evaluation": "run-2",
        "target": "polite@1",
        "created_at": 1.0,
    }


def test_runs_are_listed_a_page_at_a_time(running: Running, http: httpx.Client) -> None:
    for number in range(5):
        stored(running, f"job-{number}")
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = http.get("/v1/evaluations", params={"limit": 2, **after}).json()
        pages.append([one["id"] for one in page["data"]])
        if not page["has_more"]:
            break
        after = {"after": pages[-1][-1]}
    assert pages == [["job-4", "job-3"], ["job-2", "job-1"], ["job-0"]]
    # One that never began and whose job is forgotten is left out, and not looked at again.
    listed = EvaluationStore(running.store).all  # type: ignore[arg-type]
    listed.add("job-9", "")
    assert [one["id"] for one in http.get("/v1/evaluations", params={"limit": 1}).json()["data"]] == ["job-4"]
    assert listed.newest(limit=1) == ["job-4"]
