"""/v1/learners over HTTP, and the controller that acts for them, on stores in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.jobs import JobState, KtoJob
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.cli.runner import temper
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import Keys

POLICY: dict[str, Any] = {
    "name": "l",
    "adapter": "polite",
    "method": "kto",
    "attach": False,
    "data": {"feedback": False, "split": {"validation": 0, "held_out": 0}},
    "trigger": {"min_rows": None, "every_seconds": 1},
}


def policy(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """A policy that learns from a file."""
    lines = [{"prompt": f"{n}?", "completion": str(n), "label": n % 2 == 0} for n in range(20)]
    upload = {"file": ("a.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
    return {**POLICY, "data": {**POLICY["data"], "files": [file]}, **more}


def made(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/learners", json=policy(http, **more))
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_made_changed_listed_and_deleted(running: Running, http: httpx.Client) -> None:
    one = made(http)
    assert (one["id"], one["state"], one["cycle"], one["revision"]) == ("l", "collecting", 0, 1)
    assert http.post("/v1/learners", json=one["policy"]).status_code == 409
    same = http.put("/v1/learners/l", json=one["policy"])
    assert (same.status_code, same.json()["revision"]) == (200, 1), same.text
    changed = http.put("/v1/learners/l", json={**one["policy"], "stop_after": 5}).json()
    assert (changed["revision"], changed["policy"]["stop_after"]) == (2, 5)
    assert http.put("/v1/learners/m", json=one["policy"]).status_code == 400
    assert http.put("/v1/learners/m", json={**one["policy"], "name": "m"}).status_code == 201
    listed = http.get("/v1/learners?limit=1").json()
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == (["l"], True)
    assert [one["id"] for one in http.get("/v1/learners?after=l").json()["data"]] == ["m"]
    told = http.get("/v1/learners/l/events?limit=1").json()
    assert ([one["kind"] for one in told["data"]], told["has_more"]) == (["changed"], True)
    rest = http.get(f"/v1/learners/l/events?after={told['data'][0]['id']}").json()
    assert [one["kind"] for one in rest["data"]] == ["collecting"]
    assert http.delete("/v1/learners/l").json() == {"id": "l", "object": "learner", "deleted": True}
    assert http.get("/v1/learners/l").status_code == 404


def test_paused_resumed_and_run(running: Running, http: httpx.Client) -> None:
    made(http)
    assert http.post("/v1/learners/l/pause").json()["state"] == "paused"
    refused = http.post("/v1/learners/l/run")
    assert (refused.status_code, "resume it first" in refused.text) == (409, True)
    for _ in range(2):
        assert http.post("/v1/learners/l/resume").json()["state"] == "collecting"
    assert http.post("/v1/learners/l/run").status_code == 200
    kinds = [one["kind"] for one in http.get("/v1/learners/l/events").json()["data"]]
    assert kinds == ["resumed", "paused", "collecting"], "what changes nothing is no event"


def test_a_plan_says_what_a_cycle_would_do(running: Running, http: httpx.Client) -> None:
    made(http, gate={"gain": [{"suite": "none"}]}, trigger={"min_rows": 5})
    plan = http.get("/v1/learners/l/plan").json()
    assert (plan["begins"], plan["why"]) == (False, "0 of 5 new rows are there")
    assert (plan["rows"]["train"], plan["examples"]) == (20, 20)
    assert (plan["job"]["adapter"], plan["job"]["attach"]) == ("polite", False)
    assert plan["problems"] == ["suite 'none' does not exist"]
    assert http.get("/v1/datasets").json()["data"] == []
    assert running.queue.jobs == {}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"anchor": {"dataset": "none", "share": 0.1}}, 404, "anchor.dataset"),
    ({"settings": {"betta": 1}}, 400, "settings"),
    ({"adapter": "tiny"}, 400, "adapter"),
    ({"method": "opd"}, 400, "method"),
    ({"data": {"mix": [{"datasets": ["none"], "share": 0.1}]}}, 404, "data.mix[0].datasets"),
    ({"trigger": {"min_rows": None}}, 400, "trigger.min_rows"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
def test_what_a_policy_cannot_be(
    running: Running, http: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post("/v1/learners", json={**POLICY, "data": {}, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_the_controller_goes_from_data_to_promotion(start: Starter) -> None:
    running = start(learners=True)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        one = made(http, gate={"metric": "eval_loss"}, settings={"eval_fraction": 0.2})

        def state() -> dict[str, Any]:
            return http.get("/v1/learners/l").json()  # type: ignore[no-any-return]

        running.wait_for(lambda: state()["state"] == "training")
        (job,) = running.queue.jobs.values()
        spec = running.queue.specs[job.id]
        assert isinstance(spec, KtoJob)
        assert (spec.dataset, spec.attach, spec.metadata) == ("l@1", False, {"learner": "l", "cycle": "1"})
        assert http.get("/v1/datasets/l").json()["rows"]["train"] == 20
        running.queue.jobs[job.id] = job.model_copy(
            update={"state": JobState.SUCCEEDED, "result_adapter": "polite@1", "started_at": 1.0, "finished_at": 3.0}
        )
        running.wait_for(lambda: state()["outcome"] == "promoted")
        assert state()["promoted"] == "polite@1"
        events = http.get("/v1/learners/l/events").json()["data"]
        kinds = [event["kind"] for event in reversed(events) if event["cycle"] < 2]
        assert kinds == ["collecting", "preparing", "data", "training", "promoted"]
        by_kind = {event["kind"]: event for event in events if event["cycle"] == 1}
        assert by_kind["data"]["evidence"]["rows"]["train"] == 20
        assert by_kind["promoted"]["evidence"]["candidate"] == "polite@1"
        metrics = http.get("/metrics").text
        assert 'temper_learner_cycles_total{learner="l",outcome="promoted"} 1.0' in metrics
        assert 'temper_learner_state{learner="l",state="stopped"} 0.0' in metrics
        running.wait_for(lambda: state()["cycle"] == 2 and state()["state"] == "training")
        second = state()["job"]
        assert second != job.id
        http.put("/v1/learners/l", json={**one["policy"], "data": {"feedback": True}})
        assert http.delete("/v1/learners/l").status_code == 200
        assert running.queue.jobs[second].state is JobState.CANCELLED


def test_a_cycle_without_rows_is_an_event(start: Starter) -> None:
    running = start(learners=True)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        http.post("/v1/learners", json={**POLICY, "data": {}})
        running.wait_for(lambda: http.get("/v1/learners/l").json()["outcome"] == "failed")
        one = http.get("/v1/learners/l").json()
        assert (one["state"], one["faults"], one["not_before"] > one["entered_at"] + 29) == ("collecting", 1, True)
        event = http.get("/v1/learners/l/events").json()["data"][0]
        assert event["kind"] == "failed"
        assert "no row fulfils all conditions" in event["detail"]
        assert running.queue.jobs == {}


def test_learners_are_their_keys(start: Starter, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("mine", Scope.TRAIN, Scope.INFERENCE)
    keys.add("rival", Scope.TRAIN)
    keys.add("admin", Scope.ADMIN, Scope.ATTACH)
    keys.add("app", Scope.INFERENCE)
    running = start(api_keys_file=str(keys.path))

    def call(method: str, path: str = "", *, key: str = "mine", **options: Any) -> httpx.Response:
        return httpx.request(method, f"{running.url}/v1/learners{path}", headers=keys.bearer(key), **options)

    body = {**POLICY, "data": {}}
    assert call("POST", key="app", json=body).status_code == 403
    assert call("POST", json={**body, "attach": True}).status_code == 403, "the key may not attach"
    assert call("POST", json={**body, "canary": {}}).status_code == 403
    left_open = {name: value for name, value in body.items() if name != "attach"}
    assert call("POST", json=left_open).json()["policy"]["attach"] is False
    for method, path in [("GET", "/l"), ("GET", "/l/plan"), ("POST", "/l/pause"), ("POST", "/l/run"), ("DELETE", "/l")]:
        assert call(method, path, key="rival").status_code == 404, path
    assert call("PUT", "/l", key="rival", json=body).status_code == 403
    assert call("GET", key="rival").json()["data"] == []
    assert [one["id"] for one in call("GET", key="admin").json()["data"]] == ["l"]
    assert call("POST", "/l/pause", key="admin").json()["state"] == "paused"


def test_from_the_command_line(running: Running, http: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "l.yaml"
    file.write_text("name: l\nadapter: polite\nmethod: kto\nattach: false\ntrigger: {min_rows: 7}\n")

    def run(*words: str, code: int = 0) -> str:
        result = temper("learner", *words, url=running.url)
        assert result.exit_code == code, result.stderr + result.stdout
        return result.stdout if code == 0 else result.stderr

    assert "kto → polite  collecting, cycle 0, policy 1" in run("apply", str(file))
    assert "policy 2" in run("apply", str(file), "--set", "trigger.min_rows=9")
    assert "polite" in run("list")
    assert '"min_rows": 9' in run("show", "l")
    assert "waits: 0 of 9 new rows are there" in run("plan", "l")
    assert "paused" in run("pause", "l")
    assert "collecting" in run("resume", "l")
    run("run", "l")
    assert "resumed" in run("events", "l")
    assert "is removed" in run("delete", "l")
    file.write_text("name: l\nadapter: [")
    assert "is not YAML" in run("apply", str(file), code=2)
