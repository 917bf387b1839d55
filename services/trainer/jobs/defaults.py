"""What a job leaves open: how fast it learns and how often it goes through its examples.

docs/guides/training.md tells users the same, and docs/decisions/training-defaults.md why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["sft", "dpo", "kto", "grpo", "opd", "session"]

WIDTH = 2560
"""Hidden size of the model that the rates are for (4B)."""
_WIDEST, _NARROWEST = 2 * WIDTH, WIDTH // 10
"""Hidden sizes between which a rate follows the width."""
_MOST_SEEN = 25_000
"""Examples that a job goes through, all epochs together, unless a single epoch has more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The defaults of one method."""

    learning_rate: float
    """At WIDTH."""
    epochs: int = 1
    least_steps: int = 1
    """Optimizer steps below which a job makes further epochs: one step moves an adapter by about one learning rate a
    number, however much the examples have to say."""


PACES: dict[Method, Pace] = {
    "sft": Pace(2e-4, epochs=3, least_steps=30),
    "dpo": Pace(2e-5, least_steps=20),
    "kto": Pace(2e-5, least_steps=20),
    "grpo": Pace(4e-5),
    "opd": Pace(1e-4),
    "session": Pace(1e-4),
}


def learning_rate(method: Method, hidden_size: int) -> float:
    """AdamW's rate for adapters on a model of this width: inversely proportional to it."""
    width = min(max(hidden_size, _NARROWEST), _WIDEST)
    return PACES[method].learning_rate * WIDTH / width


def epochs(method: Method, examples: int, steps_per_epoch: int) -> int:
    """Passes over the examples: the method's usual number, more of few examples and fewer of many."""
    pace = PACES[method]
    affordable = max(1, min(pace.epochs, _MOST_SEEN // examples))
    return max(affordable, -(-pace.least_steps // steps_per_epoch))
