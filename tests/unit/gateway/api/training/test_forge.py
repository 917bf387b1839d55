"""/v1/forge: names become versions, what cannot run is refused by its field, and an owner reads what came of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.jobs import ForgeJob, JobState
from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.api.evaluation.test_suites import suite
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of

BODY: dict[str, Any] = {"prune": {"mlp_channels": "25%"}, "importance": {"method": "weights"}}
RECORD = {
    "outputs": {"digest": "ab"},
    "plan": {"parameters": 4, "parameters_after": 3},
    "evaluation": {"before": {}, "after": {}, "compared": {}},
}


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


def ended(running: Running, run: str, record: dict[str, Any] | None) -> None:
    """A run as its trainer leaves it."""
    if record is not None:
        running.store.put(f"forged/{run}/forge.json", json.dumps(record).encode())
    running.queue.jobs[run] = running.queue.jobs[run].model_copy(update={"state": JobState.SUCCEEDED})


def test_a_run_is_queued_once_and_tells_where_its_checkpoint_is(running: Running, http: httpx.Client) -> None:
    assert http.post("/v1/eval/suites", json=suite()).status_code == 201
    headers = {"idempotency-key": "forge-once"}
    answer = http.post("/v1/forge", json=BODY | {"suites": ["sums"]}, headers=headers)
    assert answer.status_code == 202, answer.text
    made = answer.json()
    assert answer.headers["location"] == f"/v1/forge/{made['id']}"
    assert (made["object"], made["state"], made["model"]) == ("forge.run", "queued", None)
    again = http.post("/v1/forge", json=BODY | {"suites": ["sums"]}, headers=headers)
    assert again.json()["id"] == made["id"]
    spec = running.queue.specs[made["id"]]
    assert isinstance(spec, ForgeJob)
    assert spec.suites == ["sums@1"]
    ended(running, made["id"], RECORD)
    done = http.get(f"/v1/forge/{made['id']}").json()
    assert (done["state"], done["digest"], done["plan"]) == ("succeeded", "ab", RECORD["plan"])
    assert done["model"].startswith("s3://")
    assert done["model"].endswith(f"/forged/{made['id']}")
    assert done["evaluation"] == RECORD["evaluation"]


def test_runs_are_listed_by_pages_and_other_jobs_are_none(running: Running, http: httpx.Client) -> None:
    runs = [http.post("/v1/forge", json=BODY | {"name": f"m{number}"}).json()["id"] for number in range(3)]
    ended(running, runs[0], RECORD)
    ended(running, runs[1], None)
    sft = {"adapter": "polite", "examples": [{"prompt": "2+2", "completion": "4"}]}
    job = http.post("/v1/train/sft", json=sft).json()["id"]
    first = http.get("/v1/forge", params={"limit": 2}).json()
    last = http.get("/v1/forge", params={"limit": 1, "after": first["data"][-1]["id"]}).json()
    assert first["has_more"]
    listed = first["data"] + last["data"]
    assert [one["id"] for one in listed] == runs[::-1]
    assert [one["model"] is None for one in listed] == [True, True, False]
    assert error_of(http.get("/v1/forge", params={"after": job}), 404)["param"] == "after"
    for nothing in (job, "nothing"):
        assert error_of(http.get(f"/v1/forge/{nothing}"), 404)["param"] == "run"


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"suites": ["sums", "products"]}, 404, "suites[1]"),
        ({"suites": ["sums@7"]}, 404, "suites[0]"),
        ({"suites": ["sums", "sums"]}, 400, "suites"),
        ({"prune": {}}, 400, "prune"),
        ({"prune": {"mlp_channels": "a lot"}}, 400, "prune.mlp_channels"),
        ({"importance": {"method": "activations"}}, 400, "examples"),
        ({"recover": {}}, 400, "examples"),
        ({"max_shard_gb": 6}, 400, "max_shard_gb"),
    ],
)
def test_what_cannot_run_is_refused_by_its_field(
    running: Running, http: httpx.Client, changes: dict[str, Any], status: int, field: str
) -> None:
    http.post("/v1/eval/suites", json=suite())
    before = len(running.queue.jobs)
    error = error_of(http.post("/v1/forge", json=BODY | changes), status)
    assert str(error["param"]).startswith(field), error
    assert len(running.queue.jobs) == before


def test_a_suite_that_an_engine_may_not_score_is_refused(start: Starter) -> None:
    running = start(FakeEngine(webhooks=engine_pb2.RewardWebhooks()))
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False) as http:
        webhook = {"type": "webhook", "url": "https://scores.example/v1"}
        assert http.post("/v1/eval/suites", json=suite("scored", scorer=webhook)).status_code == 201
        error = error_of(http.post("/v1/forge", json=BODY | {"suites": ["scored"]}), 400)
    assert str(error["param"]).startswith("suites[0].scorer")
    assert not running.queue.jobs


def test_runs_belong_to_their_key(start: Starter, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name, scope in {"alice": Scope.TRAIN, "bob": Scope.TRAIN, "operator": Scope.ADMIN}.items():
        keys.add(name, scope)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    seen, run = {}, ""
    for name in keys.entries:
        with httpx.Client(base_url=running.url, headers=keys.bearer(name), timeout=PATIENCE, trust_env=False) as caller:
            run = run or caller.post("/v1/forge", json=BODY).json()["id"]
            status = caller.get(f"/v1/forge/{run}").status_code
            seen[name] = (status, len(caller.get("/v1/forge").json()["data"]))
    assert seen == {"alice": (200, 1), "bob": (404, 0), "operator": (200, 1)}


def test_a_checkpoint_is_removed_behind_its_run(running: Running, http: httpx.Client) -> None:
    run = http.post("/v1/forge", json=BODY).json()["id"]
    running.store.put(f"forged/{run}/model.safetensors", b"weights")
    running.store.put(f"forged/{run}0/forge.json", b"{}")
    error = error_of(http.delete(f"/v1/forge/{run}"), 409)
    assert error["param"] == "run"
    assert "cancel it first" in error["message"]
    ended(running, run, RECORD)
    answer = http.delete(f"/v1/forge/{run}")
    assert (answer.status_code, answer.json()) == (200, {"id": run, "object": "forge.run", "deleted": True})
    assert [key for key in running.store.objects if key.startswith("forged/")] == [f"forged/{run}0/forge.json"]
    assert http.get(f"/v1/forge/{run}").json()["model"] is None
    assert http.delete(f"/v1/forge/{run}").status_code == 200, "there is nothing more to remove"


def test_what_a_run_that_is_over_has_left_unfinished_goes(running: Running, http: httpx.Client) -> None:
    cancelled, goes_on, whole = (http.post("/v1/forge", json=BODY | {"name": f"m{n}"}).json()["id"] for n in range(3))
    for run in (cancelled, goes_on, whole, "by-hand"):
        running.store.put(f"forged/{run}/.forging", b"ab")
        running.store.put(f"forged/{run}/model.safetensors", b"weights")
    assert running.run(running.app.state.tidying.once()) == {"forge": 0, "tinker": 0}
    assert http.post(f"/v1/train/jobs/{cancelled}/cancel").json()["state"] == "cancelled"
    ended(running, whole, RECORD)
    assert running.run(running.app.state.tidying.once()) == {"forge": 1, "tinker": 0}
    left = {key.split("/")[1] for key in running.store.objects if key.startswith("forged/")}
    assert left == {goes_on, whole, "by-hand"}
    running.store.down = True
    assert running.run(running.app.state.tidying.once()) == {}
    running.store.down = False
    assert running.run(running.app.state.tidying.once()) == {"forge": 0, "tinker": 0}


def test_only_its_key_and_administrators_remove_a_checkpoint(start: Starter, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name, scope in {"alice": Scope.TRAIN, "bob": Scope.TRAIN, "operator": Scope.ADMIN}.items():
        keys.add(name, scope)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)

    def caller(name: str) -> httpx.Client:
        return httpx.Client(base_url=running.url, headers=keys.bearer(name), timeout=PATIENCE, trust_env=False)

    with caller("alice") as alice, caller("bob") as bob, caller("operator") as operator:
        run = alice.post("/v1/forge", json=BODY).json()["id"]
        ended(running, run, RECORD)
        running.store.put("forged/job-forgotten/model.safetensors", b"of a run that is not listed any more")
        assert error_of(bob.delete(f"/v1/forge/{run}"), 404)["param"] == "run"
        error_of(alice.delete("/v1/forge/job-forgotten"), 404)
        error_of(operator.delete("/v1/forge/job-never-was"), 404)
        assert len([key for key in running.store.objects if key.startswith("forged/")]) == 2
        assert operator.delete("/v1/forge/job-forgotten").json()["deleted"]
        assert alice.delete(f"/v1/forge/{run}").json()["deleted"]
    assert not [key for key in running.store.objects if key.startswith("forged/")]
