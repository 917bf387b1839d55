"""/v1/eval/suites/{suite}/contamination: what a version was trained on, and what is not known."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.evaluation.contamination.texts import ReadText, Turn
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.key_file import error_of


@pytest.fixture
def http(running: Running) -> Any:
    with httpx.Client(base_url=running.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


def publish(running: Running, job_id: str | None) -> AdapterVersion:
    files = {WEIGHTS: b"weights", CONFIG: json.dumps({"r": 1}).encode()}
    return running.registry.publish("bot", files, base_digest="b", job_id=job_id).ref


def test_contaminated_items_are_named(running: Running, http: httpx.Client) -> None:
    rows = [{"prompt": f"What is {number} plus 1?", "expected": number + 1} for number in range(4)]
    body = {"name": "sums", "scorer": {"type": "exact"}, "jsonl": "\n".join(map(json.dumps, rows))}
    assert http.post("/v1/eval/suites", json=body).status_code == 201
    publish(running, None)
    learnt = [ReadText.answered((Turn("user", rows[number]["prompt"]),), ("x",)) for number in (1, 2)]
    TrainingHashes(running.registry).write(DataSource(adapter="bot", job_id="j"), "sft", [], learnt)
    publish(running, "j")
    found = http.get("/v1/eval/suites/sums/contamination", params={"adapter": "bot", "limit": 1}).json()
    assert found == {
        "object": "eval.contamination",
        "suite": "sums@1",
        "adapter": "bot@2",
        "items": 4,
        "contaminated": 2,
        "exact": 2,
        "jobs": 1,
        "unknown": [],
        "data": [{"index": 1, "id": "2", "exact": True, "share": 0.0}],
    }
    uploaded = http.get("/v1/eval/suites/sums@1/contamination", params={"adapter": "bot@1"}).json()
    assert (uploaded["contaminated"], uploaded["jobs"], uploaded["unknown"]) == (0, 0, ["bot@1"])


def test_what_does_not_exist_is_named(running: Running, http: httpx.Client) -> None:
    error_of(http.get("/v1/eval/suites/none/contamination", params={"adapter": "bot"}), 404)
    body = {"name": "sums", "scorer": {"type": "exact"}, "jsonl": '{"prompt": "1?", "expected": 1}'}
    http.post("/v1/eval/suites", json=body)
    assert "bot" in error_of(http.get("/v1/eval/suites/sums/contamination", params={"adapter": "bot"}), 404)["message"]
    error_of(http.get("/v1/eval/suites/sums/contamination", params={"adapter": "bot@3"}), 404)
    error_of(http.get("/v1/eval/suites/sums/contamination"), 400)
