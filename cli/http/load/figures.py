"""Figures of a load: rates and percentiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cli.http.load.streams import Answer

SHARES = (0.5, 0.9, 0.99)
_STATUS_CHARACTERS = 300


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Rates a second, and milliseconds to the first token, between events and of the whole, of the answers that came.

    Rates count from the first request to the last token. Events that one read brought count as one.
    """
    good = [answer for answer in answers if not answer.status]
    failed = Counter(" ".join(answer.status.split())[:_STATUS_CHARACTERS] for answer in answers if answer.status)
    found: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "failures": dict(failed.most_common(5)),
    }
    if not good:
        return found
    seconds = max(answer.last for answer in good) - min(answer.sent for answer in good)
    tokens = sum(answer.tokens for answer in good)
    return found | {
        "seconds": round(seconds, 4),
        "output_tokens": tokens,
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(tokens / seconds, 1),
        "first_token_ms": _milliseconds([answer.first - answer.sent for answer in good]),
        "between_tokens_ms": _milliseconds([b - a for answer in good for a, b in pairwise(answer.times)]),
        "whole_ms": _milliseconds([answer.last - answer.sent for answer in good]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and longest; None: there is nothing to measure (one token has nothing between)."""
    if not seconds:
        return None
    return {
        "mean": round(1e3 * sum(seconds) / len(seconds), 3),
        **{f"p{100 * share:g}": round(1e3 * percentile(seconds, share), 3) for share in SHARES},
        "max": round(1e3 * max(seconds), 3),
    }
