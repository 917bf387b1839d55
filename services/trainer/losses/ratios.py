"""How much likelier one policy finds tokens than another, from differences of log-probabilities."""

from __future__ import annotations

from torch import Tensor

MOST_NATS = 20.0
"""A ratio of 5e8. Beyond 88 nats float32 has no number, and infinity times an advantage of 0 is none either."""


def importance_ratio(difference: Tensor) -> Tensor:
    """exp(difference), and its gradient, up to MOST_NATS; from there on it stays as it is, so that a token that one
    policy finds all but impossible has a finite loss and no gradient.

    Args:
        difference: [N] float32, of log-probabilities; of any size, infinite too.
    """
    return bounded(difference).exp()


def bounded(difference: Tensor) -> Tensor:
    """The difference as ``importance_ratio`` takes it."""
    return difference.clamp(max=MOST_NATS)
