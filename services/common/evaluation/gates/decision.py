"""Decision of a gate: one test a condition, and how the tests of several suites go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.adapters.evidence import ConditionEvidence, ConditionKind
from services.common.evaluation.runs.records import RunSuite
from services.common.evaluation.runs.results import first_to_second
from services.common.evaluation.statistics.comparison import Comparison, compare
from services.common.evaluation.statistics.margins import exceeds
from services.common.evaluation.statistics.scores import Scores
from services.common.jobs.fields.gates import Need


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of both sides on the suite of one condition, every item with one."""

    suite: RunSuite
    kind: ConditionKind
    at_least: float
    """Gain to be exceeded: 0 or more of a gain, below 0 of a loss to be ruled out."""
    before: Scores
    after: Scores
    invalid: tuple[int, int] = (0, 0)
    """Invalid answers of either side, which are in the scores."""

    def __post_init__(self) -> None:
        if (self.kind == "gain") != (self.at_least >= 0):
            raise ValueError(f"a condition of kind {self.kind} cannot ask for a gain of {self.at_least:g}")


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of a gate."""

    passed: bool
    conditions: tuple[ConditionEvidence, ...]


def decide(measured: Sequence[Measured], *, need: Need, alpha: float) -> Decision:
    """Decides a gate. The probability that it passes a result that should not pass is at most ``alpha``.

    All conditions must be shown, each at ``alpha`` (intersection-union: whichever is false is let pass with at most
    that probability). With ``need`` "any", the gains are tested by Holm's procedure, and one of them suffices.

    Args:
        measured: the conditions in the order of the gate.
    """
    tests = [_tested(one) for one in measured]
    gains = [place for place, one in enumerate(measured) if one.kind == "gain"]
    levels = dict.fromkeys(range(len(measured)), alpha)
    passed = {place: test.p <= alpha for place, test in enumerate(tests)}
    if need == "any":
        rejecting = True
        for rank, place in enumerate(sorted(gains, key=lambda place: tests[place].p)):
            levels[place] = alpha / (len(gains) - rank)
            rejecting = passed[place] = rejecting and tests[place].p <= levels[place]
    gained = any(passed[place] for place in gains) if need == "any" else all(passed[place] for place in gains)
    kept = all(passed[place] for place, one in enumerate(measured) if one.kind == "no_loss")
    return Decision(
        gained and kept,
        tuple(
            _evidence(one, test, levels[place], passed[place])
            for place, (one, test) in enumerate(zip(measured, tests, strict=True))
        ),
    )


@dataclass(frozen=True, slots=True)
class _Tested:
    p: float
    comparison: Comparison


def _tested(one: Measured) -> _Tested:
    """Comparison of both sides, and the one-sided p-value of the condition."""
    first, second = first_to_second(one.suite, one.before, one.after)
    comparison = compare(first, second, alternative="better")
    if one.at_least == 0:
        return _Tested(comparison.p, comparison)
    differences = second.minus(first)
    return _Tested(exceeds(differences, one.at_least, _lowest(one, differences)), comparison)


def _lowest(one: Measured, differences: Scores) -> float:
    """The worst difference that an item can have. Of scores without bounds (a perplexity's), one that is as far below
    the margin as any difference was from it."""
    if one.suite.better == "higher" and all(0 <= score <= 1 for score in (*one.before.values, *one.after.values)):
        return -1.0
    return one.at_least - max(1e-9, *(abs(value - one.at_least) for value in differences.values))


def _evidence(one: Measured, test: _Tested, level: float, passed: bool) -> ConditionEvidence:
    found = test.comparison
    return ConditionEvidence(
        kind=one.kind,
        suite=one.suite.suite,
        digest=one.suite.digest,
        at_least=one.at_least,
        items=found.items,
        clusters=found.clusters,
        before=one.before.mean,
        after=one.after.mean,
        invalid=one.invalid,
        gain=found.effect,
        interval=(found.interval.low, found.interval.high),
        p=test.p,
        test=found.test if one.at_least == 0 else "bounded-mean",
        alpha=level,
        better=found.better,
        worse=found.worse,
        sees=found.sees,
        passed=passed,
    )
