"""Results in lm-evaluation-harness' form: what is written is read again, and what is not whole is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.evaluation.runs.harness import exported_results, exported_sample, read_task
from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, RunSuite, RunTarget
from services.common.evaluation.runs.results import result_of, scores_of
from services.common.evaluation.statistics.comparison import compare
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling

SCORES = (1.0, 0.0, 1.0, 0.5)


def answered(scores: tuple[float, ...] = SCORES, logprobs: tuple[float, ...] | None = None) -> list[ItemResult]:
    return [
        ItemResult(
            item=f"q{index}",
            index=index,
            score=score,
            weight=1.0,
            answers=(Answer(text=f"a{index}", score=score, logprobs=logprobs), Answer(text="b", score=score)),
        )
        for index, score in enumerate(scores)
    ]


ITEMS = [SuiteItem(id=f"q{index}", prompt=f"{index}?", expected=[str(index)]) for index in range(len(SCORES))]
RECORD = RunRecord(
    id="job-1",
    suites=(RunSuite(suite="sums@3", digest="d", items=4, scorer="exact", better="higher", sampling=SuiteSampling()),),
    targets=(RunTarget(name="bot@2"),),
    seed=7,
    base_digest="b",
    created_at=5.0,
)


def exported(results: list[ItemResult] | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    results = results or answered()
    result = result_of(RECORD, {(0, 0): results}, 6.0)
    rows = [exported_sample(item, one) for item, one in zip(ITEMS, results, strict=True)]
    return exported_results(RECORD, result, "bot@2", {"sums@3": 2}), rows


def test_a_run_is_written_as_the_harness_writes_it() -> None:
    results, rows = exported()
    assert results["results"] == {
        "sums": {"name": "sums", "alias": "sums", "sample_len": 4, "score,none": 0.625, "score_stderr,none": "N/A"}
    }
    assert (results["versions"], results["higher_is_better"]) == ({"sums": 3}, {"sums": {"score": True}})
    assert results["n-samples"] == {"sums": {"original": 4, "effective": 4}}
    assert (results["model_name"], results["date"], results["n-shot"]) == ("bot@2", 5.0, {"sums": 2})
    assert (rows[1]["doc"]["id"], rows[1]["target"], rows[1]["resps"]) == ("q1", "1", [["a1", "b"]])
    json.dumps([results, rows], allow_nan=False)


def test_two_versions_of_a_suite_are_two_tasks() -> None:
    twice = RECORD.model_copy(
        update={"suites": (*RECORD.suites, RECORD.suites[0].model_copy(update={"suite": "sums@4"}))}
    )
    found = result_of(twice, {(0, 0): answered(), (1, 0): answered((1.0, 1.0, 1.0, 1.0))}, 6.0)
    results = exported_results(twice, found, "bot@2", {})["results"]
    assert {name: one["score,none"] for name, one in results.items()} == {"sums@3": 0.625, "sums@4": 1.0}


def test_likelihoods_are_one_response_a_choice() -> None:
    _, rows = exported(answered(logprobs=(-1.5, -2.0)))
    assert rows[0]["resps"] == [[["-1.5", None]], [["-2.0", None]]]


def test_what_is_written_is_read_again() -> None:
    results, rows = exported()
    task = read_task(results, "sums", reversed(rows))
    assert (task.name, task.version, task.metric, task.higher_is_better) == ("sums", "3", "score,none", True)
    assert [(one.item, one.index, one.score, one.answers[0].text) for one in task.items] == [
        (f"q{index}", index, score, f"a{index}") for index, score in enumerate(SCORES)
    ]
    other = answered((1.0, 1.0, 1.0, 1.0))
    assert compare(scores_of(task.items), scores_of(other)).effect == pytest.approx(0.375)


def test_rows_of_other_filters_are_passed_over() -> None:
    results, rows = exported()
    results["results"]["sums"]["score,strict-match"] = 0.0
    strict = [{**row, "filter": "strict-match", "score": False} for row in rows]
    assert sum(one.score for one in read_task(results, "sums", [*strict, *rows]).items) == sum(SCORES)
    assert sum(one.score for one in read_task(results, "sums", [*strict, *rows], "score,strict-match").items) == 0


def test_what_is_not_whole_is_refused() -> None:
    results, rows = exported()
    other_mean = {**results, "results": {"sums": {"score,none": 0.7}}}
    for given, samples, task, metric, reason in (
        (results, rows[:-1], "sums", None, "3 of the 4 documents have a row"),
        (results, rows, "other", None, "no task 'other'"),
        (results, [*rows, rows[0]], "sums", None, "doc_id 0 is none, or there twice"),
        (results, [*rows[:-1], "no row"], "sums", None, "no JSON object"),
        (results, rows, "sums", "acc,none", "no 'acc,none', but score,none"),
        (results, [{**row, "score": float("nan")} for row in rows], "sums", None, "has no number 'score'"),
        (results, [{**row, "score": [1, 2]} for row in rows], "sums", None, "has no number 'score'"),
        (other_mean, rows, "sums", None, "is 0.7, and the mean over its documents 0.625"),
        ({**results, "higher_is_better": {}}, rows, "sums", None, "which way"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            read_task(given, task, samples, metric)
