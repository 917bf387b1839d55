"""/v1/evaluations in lm-evaluation-harness' form: what is exported is imported again, and says that it was."""

from __future__ import annotations

import json

import httpx

from tests.unit.gateway.api.evaluation.test_runs import stored
from tests.unit.gateway.api.evaluation.test_suites import suite
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.key_file import error_of


def test_a_run_is_exported_and_imported_again(running: Running, http: httpx.Client) -> None:
    assert http.post("/v1/eval/suites", json=suite()).json()["id"] == "sums@1"
    stored(running, "run-exported")
    place = "/v1/evaluations/run-exported/harness"
    results = http.get(place, params={"target": "polite@1"}).json()
    assert (results["model_name"], results["results"]["sums"]["score,none"]) == ("polite@1", 1.0)
    pages = [
        http.get(f"{place}/samples", params={"target": "polite@1", "limit": 1, "after": after}).json()
        for after in (-1, 0)
    ]
    assert [(page["task"], page["has_more"]) for page in pages] == [("sums", True), ("sums", False)]
    samples = {"sums": "".join(json.dumps(page["data"][0]) + "\n" for page in pages)}
    body = {"results": results, "samples": samples, "metadata": {"from": "elsewhere"}}
    answer = http.post("/v1/evaluations/import", json=body, headers={"idempotency-key": "import-once"})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert http.post("/v1/evaluations/import", json=body, headers={"idempotency-key": "import-once"}).json() == made
    assert made["imported"] == {"program": "lm-evaluation-harness", "model": "polite@1", "date": str(results["date"])}
    found = http.get(f"/v1/evaluations/{made['id']}").json()
    assert found == made
    assert (found["state"], found["metadata"]["from"], found["suites"][0]["sampling"]) == (
        "succeeded",
        "elsewhere",
        None,
    )
    assert (found["summaries"][0]["mean"], found["summaries"][0]["items"]) == (1.0, 2)
    items = http.get(f"/v1/evaluations/{made['id']}/items").json()["data"]
    assert [(one["score"], one["answers"][0]["finish_reason"]) for one in items] == [(1.0, "unknown")] * 2
    assert made["id"] in [one["id"] for one in http.get("/v1/evaluations").json()["data"]]
    assert "was imported" in error_of(http.get(f"/v1/evaluations/{made['id']}/harness"), 400)["message"]
    assert http.delete("/v1/eval/suites/sums@1").status_code == 200
    assert http.get(place).json()["n-shot"] == {}, "the scores outlive the suite"
    assert error_of(http.get(f"{place}/samples"), 404)["param"] == "suite"


def test_what_is_no_result_of_the_harness_is_refused_and_not_kept(http: httpx.Client) -> None:
    for body, field, said in (
        ({"results": {}, "samples": {}}, "samples", "at least 1"),
        ({"results": {}, "samples": {"t": ""}}, "results", "no task 't'"),
        ({"results": {}, "samples": {"t": "{"}, "metrics": {"u": "acc,none"}}, "metrics", "task 'u'"),
        (
            {
                "results": {"results": {"t": {"acc,none": 1}}, "n-samples": {"t": {"effective": 1}}},
                "samples": {"t": "\n{"},
            },
            "samples",
            "samples.t: line 2 is not JSON",
        ),
    ):
        error = error_of(http.post("/v1/evaluations/import", json=body), 400)
        assert (error["param"], said in error["message"]) == (field, True), error
    assert http.get("/v1/evaluations").json()["data"] == []
