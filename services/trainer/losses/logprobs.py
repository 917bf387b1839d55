"""Operations on log-probabilities of packed tokens: their mean, ratios between two policies, sums over sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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


def negative_log_likelihood(logprobs: Tensor, total_tokens: int) -> Tensor:
    """This microbatch's part of the mean over ``total_tokens`` targets of the step.

    Args:
        logprobs: [N] float32, log-probability of each target.
    """
    return -logprobs.sum() / total_tokens


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[D]: the sum over each sequence's rows. In order, unlike an index_add on a GPU, so it repeats bit by bit.

    Args:
        values: [N], the rows of the sequences one behind another.
        lengths: rows of each; they add up to N.
    """
    return torch.stack([part.sum() for part in torch.split(values, list(lengths))])


def per_row(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N]: the value [D] of each row's sequence."""
    return torch.repeat_interleave(values, torch.tensor(lengths, device=values.device), output_size=sum(lengths))
