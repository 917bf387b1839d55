"""Results of a run, out of its items: means with intervals, and all pairs of targets compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

from services.common.evaluation.runs.records import (
    Bounds,
    ItemResult,
    PairResult,
    RunRecord,
    RunResult,
    RunSuite,
    Summary,
)
from services.common.evaluation.statistics.comparison import compare
from services.common.evaluation.statistics.intervals import Interval, estimate
from services.common.evaluation.statistics.scores import Scores
from services.common.jobs.scorers.of_suites.likelihood import PerplexitySpec, perplexity

Found = Mapping[tuple[int, int], Sequence[ItemResult]]
"""Every item of a run in order, by the places of its suite and its target in the record."""
_PERPLEXITY: str = PerplexitySpec.model_fields["type"].default


def result_of(record: RunRecord, found: Found, finished_at: float) -> RunResult:
    """The result of a run. The full suite is the denominator: each item has a score, also where its answers are
    invalid."""
    summaries, comparisons = [], []
    for place, suite in enumerate(record.suites):
        scores = []
        for number, target in enumerate(record.targets):
            items = found[place, number]
            if len(items) != suite.items:
                raise ValueError(f"{len(items)} of the {suite.items} items of {suite.suite} for {target.name}")
            scores.append(scores_of(items))
            summaries.append(_summary(suite, target.name, items, scores[-1]))
        for first, second in combinations(range(len(record.targets)), 2):
            names = record.targets[first].name, record.targets[second].name
            if (pair := compared(suite, names, scores[first], scores[second])) is not None:
                comparisons.append(pair)
    return RunResult(id=record.id, summaries=tuple(summaries), comparisons=tuple(comparisons), finished_at=finished_at)


def scores_of(items: Sequence[ItemResult]) -> Scores:
    """Scores of items as statistics take them."""
    return Scores([one.score for one in items], [one.weight for one in items], [one.group for one in items])


def first_to_second(suite: RunSuite, first: Scores, second: Scores) -> tuple[Scores, Scores]:
    """Scores in the order in which their difference is the gain of the second target, whichever direction is better."""
    return (second, first) if suite.better == "lower" else (first, second)


def compared(suite: RunSuite, names: tuple[str, str], first: Scores, second: Scores) -> PairResult | None:
    """Comparison of two targets; None: all items are of one group."""
    if len(first.clusters) < 2:
        return None
    found = compare(*first_to_second(suite, first, second))
    return PairResult(
        suite=suite.suite,
        first=names[0],
        second=names[1],
        gain=found.effect,
        interval=_bounds(found.interval),
        p=found.p,
        test=found.test,
        better=found.better,
        worse=found.worse,
        sees=found.sees,
    )


def _summary(suite: RunSuite, target: str, items: Sequence[ItemResult], scores: Scores) -> Summary:
    answers = [answer for item in items for answer in item.answers]
    known = scores.binary or len(scores.clusters) > 1
    return Summary(
        suite=suite.suite,
        target=target,
        mean=scores.mean,
        interval=_bounds(estimate(scores).interval) if known else None,
        items=len(items),
        clusters=len(scores.clusters),
        answers=len(answers),
        invalid=sum(not answer.valid for answer in answers),
        tokens_mean=sum(answer.tokens for answer in answers) / len(answers),
        finish_reasons=dict(sorted(Counter(answer.finish_reason for answer in answers).items())),
        perplexity=perplexity(scores.mean) if suite.scorer == _PERPLEXITY else None,
    )


def _bounds(interval: Interval) -> Bounds:
    return Bounds(low=interval.low, high=interval.high, level=interval.level, method=interval.method)
