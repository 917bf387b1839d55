"""What a job leaves open: how fast it learns and how often it goes through its examples.

docs/guides/training.md tells users the same, and docs/decisions/training-defaults.md why.
"""

from __future__ import annotations

from services.common.jobs.base import Pace

WIDTH = 2560
"""Hidden size of the model that the rates are for (4B)."""
_WIDEST, _NARROWEST = 2 * WIDTH, WIDTH // 10
"""Hidden sizes between which a rate follows the width."""
_MOST_SEEN = 25_000
"""Examples that a job goes through, all epochs together, unless a single epoch has more."""


SESSION_PACE = Pace(1e-4)
"""Defaults of training sessions."""


def learning_rate(pace: Pace, hidden_size: int) -> float:
    """AdamW's rate for adapters on a model of this width: inversely proportional to it."""
    width = min(max(hidden_size, _NARROWEST), _WIDEST)
    return pace.learning_rate * WIDTH / width


def epochs(pace: Pace, examples: int, steps_per_epoch: int) -> int:
    """Passes over the examples: the pace's usual number, more of few examples and fewer of many."""
    affordable = max(1, min(pace.epochs, _MOST_SEEN // examples))
    return max(affordable, -(-pace.least_steps // steps_per_epoch))
