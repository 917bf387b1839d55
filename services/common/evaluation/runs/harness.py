"""Results in the form of lm-evaluation-harness 0.4: the object of its results_*.json, and the rows of its
samples_*.jsonl. Written for its tools, and read so that its results are compared like ours."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, Summary
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs.fields.messages import as_turns

METRIC = "score"
FILTER = "none"


@dataclass(frozen=True, slots=True)
class SuiteAnswers:
    """One suite as one target answered it."""

    summary: Summary
    items: Sequence[SuiteItem]
    results: Sequence[ItemResult]
    """One an item, in their order."""

    def __post_init__(self) -> None:
        if [one.index for one in self.results] != list(range(len(self.items))):
            raise ValueError(f"{len(self.results)} results of {len(self.items)} items, or not in their order")


def exported_results(record: RunRecord, target: str, answers: Sequence[SuiteAnswers]) -> dict[str, Any]:
    """The object of results_*.json: each suite is a task by its name, whose version is the suite's.

    There are no standard errors: our intervals count groups and weights, and are not made of one.
    """
    suites = {suite.suite: suite for suite in record.suites}
    tasks = [(task_name(one), suites[one.summary.suite], one) for one in answers]
    model = {"model_source": "temper", "model_name": target, "model_name_sanitized": target.replace("/", "__")}
    return {
        "results": {
            name: {
                "name": name,
                "alias": name,
                "sample_len": len(one.items),
                f"{METRIC},{FILTER}": one.summary.mean,
                f"{METRIC}_stderr,{FILTER}": "N/A",
            }
            for name, _, one in tasks
        },
        "group_subtasks": {},
        "configs": {
            name: {"task": name, "metadata": {"digest": suite.digest, "scorer": suite.scorer}}
            for name, suite, _ in tasks
        },
        "versions": {name: parse_suite_ref(suite.suite)[1] for name, suite, _ in tasks},
        "n-shot": {name: 0 for name, _, _ in tasks},
        "higher_is_better": {name: {METRIC: suite.better == "higher"} for name, suite, _ in tasks},
        "n-samples": {name: {"original": len(one.items), "effective": len(one.items)} for name, _, one in tasks},
        "config": {"model": "temper", "model_args": {"model": target, "run": record.id}, "random_seed": record.seed},
        "date": record.created_at,
        **model,
    }


def exported_samples(answers: SuiteAnswers) -> list[dict[str, Any]]:
    """The rows of samples_{task}_*.jsonl."""
    return [_row(item, result) for item, result in zip(answers.items, answers.results, strict=True)]


def task_name(answers: SuiteAnswers) -> str:
    """Name of the task that a suite is there."""
    return parse_suite_ref(answers.summary.suite)[0]


def _row(item: SuiteItem, result: ItemResult) -> dict[str, Any]:
    doc = item.model_dump(mode="json", exclude_defaults=True)
    prompt = json.dumps(as_turns(item.asked), ensure_ascii=False)
    target = (item.expected or [""])[0]
    likelihoods = result.answers[0].logprobs
    if likelihoods is None:
        # One request, of which each sample is a repetition.
        responses: list[Any] = [[answer.text for answer in result.answers]]
        filtered: list[Any] = responses[0]
    else:
        filtered = [[str(value), None] for value in likelihoods]  # whether a choice is the greedy text is not known
        responses = [[one] for one in filtered]
    return {
        "doc_id": result.index,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {}}},
        "resps": responses,
        "filtered_resps": filtered,
        "filter": FILTER,
        "metrics": [METRIC],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        METRIC: result.score,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A task as the harness ran it on one model."""

    name: str
    model: str
    metric: str
    higher_is_better: bool
    items: tuple[ItemResult, ...]
    """In the order of its documents; they have no weights and no groups."""


def imported(
    results: Mapping[str, Any], samples: Iterable[Mapping[str, Any]], task: str, metric: str, pick: str = FILTER
) -> HarnessTask:
    """Reads a task. The full number of documents is the denominator, as it is in ours.

    Args:
        results: the object of results_*.json.
        samples: the rows of samples_{task}_*.jsonl.
        pick: name of the filter whose scores are read: rows are there for each.

    Raises:
        InvalidRequest: there is no such task, metric or filter, or the rows are not those of the results.
    """
    counts = _at(results, "n-samples", task, "effective")
    if not isinstance(counts, int):
        raise InvalidRequest(f"the results hold no task {task[:80]!r}", param="results")
    rows = {}
    for row in samples:
        if row.get("filter") == pick:
            number = row.get("doc_id")
            if not isinstance(number, int) or number in rows:
                raise InvalidRequest(f"samples: doc_id {number!r} is none, or there twice", param="samples")
            rows[number] = row
    if len(rows) != counts:
        raise InvalidRequest(
            f"samples: {len(rows)} of the {counts} documents of {task} have a row with filter {pick[:80]!r}: every one "
            "counts, so give the whole file of this task",
            param="samples",
        )
    items = [_item(place, rows[number], metric) for place, number in enumerate(sorted(rows))]
    better = _at(results, "higher_is_better", task, metric)
    if not isinstance(better, bool):
        raise InvalidRequest(f"the results do not say which way {metric[:80]} of {task} is better", param="metric")
    return HarnessTask(task, str(results.get("model_name") or ""), metric, better, tuple(items))


def _item(index: int, row: Mapping[str, Any], metric: str) -> ItemResult:
    score = row.get(metric)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise InvalidRequest(f"samples: document {row['doc_id']} has no number {metric[:80]!r}", param="metric")
    first = next(iter(row.get("filtered_resps") or ()), "")
    text = first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)
    doc = row.get("doc")
    name = doc.get("id") if isinstance(doc, Mapping) else None
    return ItemResult(
        item=str(row["doc_id"] if name is None else name),
        index=index,
        score=float(score),
        weight=1.0,
        answers=(Answer(text=text, score=float(score)),),
    )


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
