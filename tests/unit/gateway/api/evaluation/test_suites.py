"""/v1/eval/suites: versions are made, read in pages and removed, each name by the key that first used it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys, error_of


def suite(name: str = "sums", count: int = 3, **more: Any) -> dict[str, Any]:
    lines = [json.dumps({"prompt": f"{number} plus 1?", "expected": number + 1}) for number in range(count)]
    return {"name": name, "scorer": {"type": "exact"}, "jsonl": "\n".join(lines), **more}


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


def test_a_suite_is_made_read_and_removed(http: httpx.Client) -> None:
    answer = http.post("/v1/eval/suites", json=suite(description="little sums"))
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["id"], made["object"], made["items"], made["clusters"]) == ("sums@1", "eval.suite", 3, 3)
    assert made["settings"]["description"] == "little sums"
    assert made["smallest_gain"] is None, "three items see nothing"
    assert http.get("/v1/eval/suites/sums").json() == http.get("/v1/eval/suites/sums@1").json() == made
    again = http.post("/v1/eval/suites", json=suite(description="little sums")).json()
    assert again == made
    second = http.post("/v1/eval/suites", json=suite(count=400)).json()
    assert second["id"] == "sums@2"
    assert 0.05 < second["smallest_gain"] < 0.07
    assert [one["id"] for one in http.get("/v1/eval/suites").json()["data"]] == ["sums@2"]
    assert [one["id"] for one in http.get("/v1/eval/suites", params={"name": "sums"}).json()["data"]] == [
        "sums@1",
        "sums@2",
    ]
    assert http.delete("/v1/eval/suites/sums@2").json() == {
        "id": "sums@2",
        "object": "eval.suite",
        "deleted": True,
        "versions": [2],
    }
    error_of(http.get("/v1/eval/suites/sums@2"), 404)
    assert http.get("/v1/eval/suites/sums").json()["id"] == "sums@1"
    assert http.delete("/v1/eval/suites/sums").json()["versions"] == [1]
    assert "does not exist" in error_of(http.get("/v1/eval/suites/sums"), 404)["message"]
    assert http.post("/v1/eval/suites", json=suite()).json()["id"] == "sums@3"


def test_items_and_suites_are_paged(http: httpx.Client) -> None:
    for name in ("a", "b", "c"):
        http.post("/v1/eval/suites", json=suite(name, 5))
    page = http.get("/v1/eval/suites", params={"limit": 2}).json()
    assert ([one["name"] for one in page["data"]], page["has_more"]) == (["a", "b"], True)
    rest = http.get("/v1/eval/suites", params={"limit": 2, "after": page["data"][-1]["id"]}).json()
    assert ([one["name"] for one in rest["data"]], rest["has_more"]) == (["c"], False)
    first = http.get("/v1/eval/suites/a/items", params={"limit": 3}).json()
    assert (first["suite"], first["total"], first["has_more"]) == ("a@1", 5, True)
    assert [(one["index"], one["id"], one["expected"]) for one in first["data"]] == [
        (0, "1", ["1"]),
        (1, "2", ["2"]),
        (2, "3", ["3"]),
    ]
    last = http.get("/v1/eval/suites/a/items", params={"limit": 3, "after": 2}).json()
    assert ([one["index"] for one in last["data"]], last["has_more"]) == ([3, 4], False)


def test_a_training_file_becomes_a_suite(http: httpx.Client) -> None:
    rows = [{"prompt": f"{n}?", "completion": str(n), "topic": n // 2} for n in range(20)]
    text = "\n".join(map(json.dumps, rows))
    split = {"fraction": 0.2, "seed": 7, "group_by": "topic"}
    made = http.post("/v1/eval/suites", json=suite(jsonl=text, split=split)).json()
    assert (made["items"], made["clusters"]) == (4, 2)
    assert made["origin"]["rows"] == 20
    assert made["origin"]["split"] == split
    items = http.get("/v1/eval/suites/sums/items").json()["data"]
    assert all(one["prompt"] == rows[int(one["id"].removeprefix("line-")) - 1]["prompt"] for one in items)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"jsonl": '{"prompt": "?", "expected": 1}\n{"prompt": 2}'}, "line 2: prompt"),
        ({"jsonl": '{"prompt": "?"'}, "line 1: is not JSON"),
        ({"scorer": {"type": "regex", "pattern": "("}}, "scorer.pattern is no RE2 pattern"),
        ({"scorer": {"type": "exact", "weight": 3.0}}, "scorer.weight must be 1"),
        ({"name": "a/b"}, "suite name 'a/b' must be"),
        ({"sampling": {"samples": 2}}, "all would be the same"),
        ({"item": []}, "item"),
    ],
)
def test_a_suite_that_cannot_be_used_is_refused_and_nothing_is_made(
    http: httpx.Client, change: dict[str, Any], told: str
) -> None:
    assert told in error_of(http.post("/v1/eval/suites", json=suite() | change), 400)["message"]
    assert http.get("/v1/eval/suites").json()["data"] == []


def test_a_repeated_request_makes_one_version(http: httpx.Client) -> None:
    header = {"idempotency-key": "nightly"}
    first = http.post("/v1/eval/suites", json=suite(), headers=header)
    http.delete("/v1/eval/suites/sums")
    second = http.post("/v1/eval/suites", json=suite(), headers=header)
    assert second.json() == first.json()
    assert second.headers["idempotency-replayed"] == "true"
    error_of(http.post("/v1/eval/suites", json=suite(count=4), headers=header), 409)


def test_a_store_that_is_away_is_told(running: Running, http: httpx.Client) -> None:
    running.store.down = True
    for answer in (http.post("/v1/eval/suites", json=suite()), http.get("/v1/eval/suites")):
        error_of(answer, 503)


def test_a_name_belongs_to_its_key(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = Keys(tmp_path_factory.mktemp("suites") / "keys.json")
    for name, scope in (
        ("alice", Scope.TRAIN),
        ("bob", Scope.TRAIN),
        ("operator", Scope.ADMIN),
        ("reader", Scope.INFERENCE),
    ):
        keys.add(name, scope)
    door = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    clients = {
        name: httpx.Client(base_url=door.url, headers=keys.bearer(name), timeout=PATIENCE, trust_env=False)
        for name in keys.entries
    }
    try:
        alice, bob, operator = (clients[name] for name in ("alice", "bob", "operator"))
        assert alice.post("/v1/eval/suites", json=suite()).status_code == 201
        assert bob.get("/v1/eval/suites/sums/items").json()["total"] == 3
        assert "another API key" in error_of(bob.post("/v1/eval/suites", json=suite(count=4)), 403)["message"]
        error_of(bob.delete("/v1/eval/suites/sums@1"), 403)
        error_of(clients["reader"].get("/v1/eval/suites"), 403)
        assert operator.post("/v1/eval/suites", json=suite(count=5)).json()["id"] == "sums@2"
        assert alice.post("/v1/eval/suites", json=suite(count=6)).json()["id"] == "sums@3", "the name is still hers"
        assert operator.delete("/v1/eval/suites/sums").json()["versions"] == [1, 2, 3]
    finally:
        for client in clients.values():
            client.close()
