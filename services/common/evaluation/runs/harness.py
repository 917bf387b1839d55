"""Results in the form of lm-evaluation-harness 0.4: the object of its results_*.json, and the rows of its
samples_*.jsonl. Written for its tools, and read so that its results stand beside ours."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.runs.records import Answer, ItemResult, RunRecord, RunResult
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs.fields.messages import as_turns

HARNESS = "lm-evaluation-harness"
METRIC = "score"
FILTER = "none"
_NO_METRICS = ("name", "alias", "sample_len", "samples", "sample_count")
"""What stands beside the metrics of a task; the texts in quotes are no numbers anyway."""
_ROUNDED = 1e-6


# Writing.


def task_names(record: RunRecord) -> dict[str, str]:
    """Task that each suite of a run is there: its name, or with its version where two versions are of one run."""
    names = [parse_suite_ref(suite.suite)[0] for suite in record.suites]
    return {
        suite.suite: name if names.count(name) == 1 else suite.suite
        for suite, name in zip(record.suites, names, strict=True)
    }


def exported_results(record: RunRecord, result: RunResult, target: str, shots: Mapping[str, int]) -> dict[str, Any]:
    """The object of results_*.json: each suite is a task, whose version is the suite's.

    There are no standard errors: our intervals count groups and weights, and are not made of one.

    Args:
        target: name of one target of the run.
        shots: answered examples in front of an item, by suite, where that is known.
    """
    tasks = task_names(record)
    suites = {suite.suite: suite for suite in record.suites}
    summaries = {tasks[one.suite]: one for one in result.summaries if one.target == target}
    return {
        "results": {
            name: {
                "name": name,
                "alias": name,
                "sample_len": one.items,
                f"{METRIC},{FILTER}": one.mean,
                f"{METRIC}_stderr,{FILTER}": "N/A",
            }
            for name, one in summaries.items()
        },
        "group_subtasks": {},
        "configs": {
            name: {
                "task": name,
                "metadata": {
                    "suite": one.suite,
                    "digest": suites[one.suite].digest,
                    "scorer": suites[one.suite].scorer,
                },
            }
            for name, one in summaries.items()
        },
        "versions": {name: parse_suite_ref(one.suite)[1] for name, one in summaries.items()},
        "n-shot": {tasks[suite]: count for suite, count in shots.items()},
        "higher_is_better": {name: {METRIC: suites[one.suite].better == "higher"} for name, one in summaries.items()},
        "n-samples": {name: {"original": one.items, "effective": one.items} for name, one in summaries.items()},
        "config": {"model": "temper", "model_args": {"model": target, "run": record.id}, "random_seed": record.seed},
        "date": record.created_at,
        "model_source": "temper",
        "model_name": target,
        "model_name_sanitized": target.replace("/", "__"),
    }


def exported_sample(item: SuiteItem, result: ItemResult) -> dict[str, Any]:
    """A row of samples_{task}_*.jsonl."""
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


# Reading.


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A task as the harness ran it on one model."""

    name: str
    version: str
    digest: str
    """Hash of its prompts; empty: it is not told."""
    metric: str
    """"name,filter"."""
    higher_is_better: bool
    items: tuple[ItemResult, ...]
    """In the order of its documents; they have no weights and no groups."""


def read_task(results: Mapping[str, Any], task: str, rows: Iterable[Any], metric: str | None = None) -> HarnessTask:
    """Reads a task. The full number of documents is the denominator, as it is in ours.

    Args:
        results: the object of results_*.json.
        rows: the objects of samples_{task}_*.jsonl.
        metric: "name,filter" as in the results; None: the first one there.

    Raises:
        InvalidRequest: there is no such task or metric, the rows are not those of the results, or their mean is not
            what the results say.
    """
    counted = _at(results, "n-samples", task, "effective")
    scores = _at(results, "results", task)
    if not isinstance(counted, int) or counted < 1 or not isinstance(scores, Mapping):
        raise InvalidRequest(f"results: there is no task {task[:80]!r} in it", param="results")
    known = [name for name, value in scores.items() if name not in _NO_METRICS and _is_metric(name, value)]
    chosen = known[0] if metric is None and known else metric
    if chosen is None or chosen not in known:
        raise InvalidRequest(
            f"metrics: task {task[:80]} has no {str(chosen)[:80]!r}, but {', '.join(known) or 'none'}", param="metrics"
        )
    name, _, pick = chosen.partition(",")
    items = _items(task, counted, rows, name, pick or FILTER)
    mean = math.fsum(item.score for item in items) / counted
    if not math.isclose(mean, scores[chosen], rel_tol=_ROUNDED, abs_tol=_ROUNDED):
        raise InvalidRequest(
            f"metrics: {chosen} of {task[:80]} is {scores[chosen]:.6g}, and the mean over its documents {mean:.6g}: "
            "only metrics that are means can be compared here, choose another one",
            param="metrics",
        )
    better = _at(results, "higher_is_better", task, name)
    if not isinstance(better, bool):
        raise InvalidRequest(
            f"results: they do not say which way {name[:80]} of {task[:80]} is better", param="results"
        )
    version, digest = _at(results, "versions", task), _at(results, "task_hashes", task)
    return HarnessTask(
        name=task,
        version="" if version is None else str(version),
        digest=digest if isinstance(digest, str) else "",
        metric=chosen,
        higher_is_better=better,
        items=tuple(items),
    )


def _is_metric(name: str, value: Any) -> bool:
    return not name.partition(",")[0].endswith("_stderr") and _number(value) is not None


def _items(task: str, counted: int, rows: Iterable[Any], metric: str, pick: str) -> list[ItemResult]:
    """Items of a task in the order of its documents: a row each, of one filter."""
    field = f"samples.{task[:80]}"
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            raise InvalidRequest(f"{field}: a line is no JSON object", param="samples")
        if row.get("filter") == pick:
            number = row.get("doc_id")
            if not isinstance(number, int) or isinstance(number, bool) or number in found:
                raise InvalidRequest(f"{field}: doc_id {str(number)[:80]} is none, or there twice", param="samples")
            found[number] = row
    if len(found) != counted:
        raise InvalidRequest(
            f"{field}: {len(found)} of the {counted} documents have a row with filter {pick[:80]!r}: every one counts, "
            "so give the whole file of this task",
            param="samples",
        )
    return [_item(field, place, found[number], metric) for place, number in enumerate(sorted(found))]


def _item(field: str, index: int, row: Mapping[str, Any], metric: str) -> ItemResult:
    score = _number(row.get(metric))
    if score is None:
        raise InvalidRequest(f"{field}: document {row['doc_id']} has no number {metric[:80]!r}", param="samples")
    filtered = row.get("filtered_resps")
    first = filtered[0] if isinstance(filtered, Sequence) and filtered else ""
    text = first if isinstance(first, str) else json.dumps(first, ensure_ascii=False)
    doc = row.get("doc")
    name = doc.get("id") if isinstance(doc, Mapping) else None
    return ItemResult(
        item=str(row["doc_id"] if name is None else name),
        index=index,
        score=score,
        weight=1.0,
        answers=(Answer(text=text, score=score, finish_reason="unknown"),),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
