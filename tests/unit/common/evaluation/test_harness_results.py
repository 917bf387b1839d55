"""Results in lm-evaluation-harness' form: what is written is read again, and what is not whole is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.common.evaluation.runs.harness import (
    FILTER,
    METRIC,
    SuiteAnswers,
    exported_results,
    exported_samples,
    imported,
)
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
    summary = result_of(RECORD, {(0, 0): results}, 6.0).summaries[0]
    answers = SuiteAnswers(summary, ITEMS, results)
    return exported_results(RECORD, "bot@2", [answers]), exported_samples(answers)


def test_a_run_is_written_as_the_harness_writes_it() -> None:
    results, rows = exported()
    assert results["results"] == {
        "sums": {"name": "sums", "alias": "sums", "sample_len": 4, "score,none": 0.625, "score_stderr,none": "N/A"}
    }
    assert (results["versions"], results["higher_is_better"]) == ({"sums": 3}, {"sums": {"score": True}})
    assert results["n-samples"] == {"sums": {"original": 4, "effective": 4}}
    assert (results["model_name"], results["date"]) == ("bot@2", 5.0)
    assert (rows[1]["doc"]["id"], rows[1]["target"], rows[1]["resps"]) == ("q1", "1", [["a1", "b"]])
    json.dumps([results, rows], allow_nan=False)


def test_likelihoods_are_one_response_a_choice() -> None:
    _, rows = exported(answered(logprobs=(-1.5, -2.0)))
    assert rows[0]["resps"] == [[["-1.5", None]], [["-2.0", None]]]


def test_what_is_written_is_read_again() -> None:
    results, rows = exported()
    task = imported(results, reversed(rows), "sums", METRIC)
    assert (task.name, task.model, task.metric, task.higher_is_better) == ("sums", "bot@2", "score", True)
    assert [(one.item, one.index, one.score, one.answers[0].text) for one in task.items] == [
        (f"q{index}", index, score, f"a{index}") for index, score in enumerate(SCORES)
    ]
    other = answered((1.0, 1.0, 1.0, 1.0))
    assert compare(scores_of(task.items), scores_of(other)).effect == pytest.approx(0.375)


def test_rows_of_other_filters_are_passed_over() -> None:
    results, rows = exported()
    strict = [{**row, "filter": "strict-match", METRIC: 0.0} for row in rows]
    assert sum(one.score for one in imported(results, [*strict, *rows], "sums", METRIC).items) == sum(SCORES)
    assert sum(one.score for one in imported(results, [*strict, *rows], "sums", METRIC, "strict-match").items) == 0


def test_what_is_not_whole_is_refused() -> None:
    results, rows = exported()
    for samples, task, metric, reason in (
        (rows[:-1], "sums", METRIC, "3 of the 4 documents of sums have a row"),
        (rows, "other", METRIC, "no task 'other'"),
        ([*rows, rows[0]], "sums", METRIC, "doc_id 0 is none, or there twice"),
        (rows, "sums", "acc", "document 0 has no number 'acc'"),
        ([{**row, METRIC: float("nan")} for row in rows], "sums", METRIC, "has no number 'score'"),
        ([{**row, METRIC: [1, 2]} for row in rows], "sums", METRIC, "has no number 'score'"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            imported(results, samples, task, metric)
    with pytest.raises(InvalidRequest, match="0 of the 4 documents"):
        imported(results, rows, "sums", METRIC, "flexible")
    with pytest.raises(InvalidRequest, match="which way"):
        imported({**results, "higher_is_better": {}}, rows, "sums", METRIC, FILTER)
    with pytest.raises(ValueError, match="not in their order"):
        SuiteAnswers(result_of(RECORD, {(0, 0): answered()}, 6.0).summaries[0], ITEMS, answered()[::-1])
