"""Figures of a simulation: what is said of an outcome, beside its ideal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.fleet.ideal import Ideal
from benchmarks.fleet.simulation import Outcome, Setting
from benchmarks.fleet.virtual.engine import GAP_STEP

HIT_BAR, FIRST_TOKEN_BAR, DOUBLING_BAR, SPREAD_BAR = 0.92, 1.5, 1.9, 2.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of all is not above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def first_tokens(outcome: Outcome) -> list[float]:
    """Seconds to the first token of each answer that has one."""
    return [one.first - one.asked for one in outcome.answers if one.first is not None]


def gap(outcome: Outcome, share: float) -> float:
    """Seconds between two tokens that so large a share of all is not above."""
    gaps: Counter[int] = Counter()
    for engine in outcome.engines:
        gaps.update(engine.gaps)
    left = share * sum(gaps.values())
    for bucket, count in sorted(gaps.items()):
        left -= count
        if left <= 0:
            return float(GAP_STEP ** (bucket + 1) / 1e6)
    return 0.0


def throughput(outcome: Outcome, seconds: float) -> float:
    """Output tokens a second of the answers that ended while the trace was played."""
    return (
        sum(one.tokens for one in outcome.answers if one.whole and one.end is not None and one.end <= seconds) / seconds
    )


def described(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """Figures of an outcome by itself."""
    started = [one for one in outcome.answers if one.first is not None]
    first = first_tokens(outcome)
    work = [engine.work for engine in outcome.engines]
    prompts = sum(one.prompt_tokens for one in started)
    tokens = sum(one.tokens for one in outcome.answers)
    hours = setting.engines * outcome.seconds / 3600
    return {
        "requests": len(outcome.answers),
        "whole": sum(one.whole for one in outcome.answers),
        "prompt_tokens": prompts,
        "output_tokens": tokens,
        "hit_rate": round(sum(one.cached for one in started) / max(1, prompts), 4),
        "first_token_s": {name: round(percentile(first, at), 4) for name, at in (("p50", 0.5), ("p99", 0.99))},
        "between_tokens_s": {name: round(gap(outcome, at), 4) for name, at in (("p50", 0.5), ("p99", 0.99))},
        "output_tokens_per_s": round(throughput(outcome, setting.seconds), 1),
        "busy": round(sum(one.busy_seconds for one in work) / (setting.engines * outcome.seconds), 3),
        "dollars_per_million_output_tokens": round(hours * setting.subject.dollars_per_hour / max(1, tokens) * 1e6, 3),
        "routed": outcome.routed,
        "retries": outcome.retries,
        "simulated_s": round(outcome.seconds, 1),
        "cpu_s": round(outcome.cpu_seconds, 1),
    }


def beside_ideal(setting: Setting, outcome: Outcome, best: Ideal) -> dict[str, Any]:
    """Figures of an outcome, and what they are of the ideal's."""
    found = described(setting, outcome)
    started = [one for one in outcome.answers if one.first is not None]
    possible = sum(best.cached.get(one.name, 0) for one in started) / max(1, found["prompt_tokens"])
    first = percentile(first_tokens(best.placed), 0.99)
    return found | {
        "ideal": described(setting, best.placed) | {"hit_rate": round(possible, 4)},
        "hit_of_ideal": round(found["hit_rate"] / possible, 4) if possible else 1.0,
        "first_token_p99_of_ideal": round(found["first_token_s"]["p99"] / first, 3) if first else 1.0,
    }


def loss(outcome: Outcome, at: float) -> dict[str, Any]:
    """What a loss of engines cost the requests that were there.

    Args:
        at: time of the loss.
    """
    there = [one for one in outcome.answers if one.asked <= at and (one.end is None or one.end > at)]
    waiting = [one for one in there if one.first is None or one.first > at]
    failed = [one for one in outcome.answers if one.error]
    return {
        "in_flight": len(there),
        "without_a_token": len(waiting),
        "lost_without_a_token": sum(bool(one.error) and one.first is None for one in outcome.answers),
        "cut_after_a_token": sum(one.first is not None for one in failed),
        "sent_again": outcome.retries.get("lost", 0),
    }
