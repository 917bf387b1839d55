"""Targets of several runs side by side: their scores on each suite, and each compared with the first, item by item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.common.evaluation.runs.records import ItemResult, PairResult, RunRecord, RunResult, RunSuite, Summary
from services.common.evaluation.runs.results import compared, scores_of
from services.common.evaluation.statistics.scores import Scores


@dataclass(frozen=True, slots=True)
class Entry:
    """One target of one run that has a result."""

    record: RunRecord
    result: RunResult
    target: int
    """Place among the record's targets."""
    label: str
    """Its name in tables."""


@dataclass(frozen=True, slots=True)
class Compared:
    """An entry on one suite."""

    suite: RunSuite
    entry: int
    """Place among the entries."""
    summary: Summary
    with_first: PairResult | None
    """Comparison of the first entry with this one; None: it is the first, or they did not answer the same items in the
    same way."""


def labelled(entries: Sequence[Entry]) -> list[Entry]:
    """Entries with labels of their own: one that several have is followed by the run's id."""
    labels = [entry.label for entry in entries]
    return [
        entry if labels.count(entry.label) == 1 else replace(entry, label=f"{entry.label} ({entry.record.id})")
        for entry in entries
    ]


def side_by_side(entries: Sequence[Entry], items: Callable[[Entry, int], Sequence[ItemResult]]) -> list[Compared]:
    """Scores and comparisons, suite by suite in the order of their first appearance.

    Args:
        items: reads all items of an entry's suite, by the suite's place in the entry's record.
    """
    suites = {suite.suite: None for entry in entries for suite in entry.record.suites}
    found = []
    for name in suites:
        first: tuple[RunSuite, Scores] | None = None
        for number, entry in enumerate(entries):
            place = next((at for at, suite in enumerate(entry.record.suites) if suite.suite == name), None)
            if place is None:
                continue
            suite, target = entry.record.suites[place], entry.record.targets[entry.target].name
            summary = next(one for one in entry.result.summaries if (one.suite, one.target) == (name, target))
            pair = None
            if len(entries) > 1 and (number == 0 or first is not None):
                scores = scores_of(items(entry, place))
                if first is None:
                    first = suite, scores
                elif (first[0].digest, first[0].sampling) == (suite.digest, suite.sampling):
                    pair = compared(suite, (entries[0].label, entry.label), first[1], scores)
            found.append(Compared(suite, number, summary, pair))
    return found
