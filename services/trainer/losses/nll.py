"""Maximum likelihood."""

from __future__ import annotations

from torch import Tensor


def negative_log_likelihood(logprobs: Tensor, total_tokens: int) -> Tensor:
    """This microbatch's part of the mean over ``total_tokens`` targets of the step.

    Args:
        logprobs: [N] float32, log-probability of each target.
    """
    return -logprobs.sum() / total_tokens
