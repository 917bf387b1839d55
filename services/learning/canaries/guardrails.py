"""Guardrails of a canary: what gateways count, held against the policy's limits at every look.

A limit counts as crossed when the lower end of an interval of the difference lies above it. The interval holds at all
looks together (services/common/evaluation/statistics/sequential.py), here with each arm's own variance: a candidate
that breaks varies as the current version does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from services.common.evaluation.statistics.sequential import Observed, half_width, own_error
from services.learning.canaries.answers import Counts
from services.learning.canaries.policy import Guardrails, Ratio, Rise
from services.learning.canaries.record import GuardrailEvidence

_ALPHA: Final = 0.01
_SEEN_RISE, _SEEN_RATIO = 0.2, math.log(2)
"""Differences that are seen first."""
_RANGE_RISE, _RANGE_RATIO = 1.0, 2.0
"""Range in which one more answer might lie: while all are equal, nobody knows how they vary."""


def guarded(limits: Guardrails, current: Counts, candidate: Counts) -> tuple[GuardrailEvidence, ...]:
    """How far each of the guardrails is from being crossed."""
    return tuple(_guarded(limits, current, candidate))


def _guarded(limits: Guardrails, current: Counts, candidate: Counts) -> Iterator[GuardrailEvidence]:
    rises: tuple[tuple[str, Rise | None, str], ...] = (
        ("errors", limits.errors, "answers"),
        ("cut_off", limits.cut_off, "whole"),
        ("repetition", limits.repetition, "whole"),
        ("broken_calls", limits.broken_calls, "calls"),
        ("refusals", limits.refusals, "whole"),
    )
    for name, rise, of in rises:
        if rise is not None:
            before, after = (_share(getattr(arm, name), getattr(arm, of)) for arm in (current, candidate))
            low = _lowest(before, after, _SEEN_RISE, _RANGE_RISE)
            yield _found(name, rise.rise, after.mean - before.mean, low, after.count >= rise.min_answers)
    ratios: tuple[tuple[str, Ratio | None, str, bool], ...] = (
        ("length", limits.length, "log_tokens", True),
        ("latency", limits.latency, "log_seconds", False),
    )
    for name, ratio, of, both_ways in ratios:
        if ratio is not None:
            before, after = (
                Observed(arm.whole, getattr(arm, of), getattr(arm, f"{of}_squares")) for arm in (current, candidate)
            )
            effect = after.mean - before.mean
            low = _lowest(before, after, _SEEN_RATIO, _RANGE_RATIO)
            if both_ways and effect < 0:
                effect, low = -effect, _lowest(after, before, _SEEN_RATIO, _RANGE_RATIO)
            yield _found(name, math.log(ratio.ratio), effect, low, after.count >= ratio.min_answers)


def _share(count: int, total: int) -> Observed:
    return Observed(total, count, count)


def _lowest(before: Observed, after: Observed, seen: float, spread: float) -> float:
    """Lower end of the interval of the difference of two means; minus the spread while there is nothing to compare."""
    if not before.count or not after.count:
        return -spread
    return max(after.mean - before.mean - half_width(own_error(before, after, spread), seen, _ALPHA), -spread)


def _found(name: str, allowed: float, effect: float, low: float, counts: bool) -> GuardrailEvidence:
    return GuardrailEvidence(name=name, allowed=allowed, effect=effect, low=low, crossed=counts and low > allowed)
