"""Losses over the log-probabilities of chosen tokens. Everything is a sum over tokens, divided by a count that covers
the whole optimizer step: so gradients do not depend on how a step is cut into microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL's GRPOTrainer."""


def negative_log_likelihood(logprobs: Tensor, total_tokens: int) -> Tensor:
    """This microbatch's part of the mean over ``total_tokens`` targets of the step.

    Args:
        logprobs: [N] float32, log-probability of each target.
    """
    return -logprobs.sum() / total_tokens


def group_advantages(rewards: Sequence[float], *, scale: bool) -> list[float] | None:
    """GRPO's advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2): rewards relative to their group.

    (R − mean) / (unbiased std + 1e-4), or R − mean when not ``scale`` (Dr. GRPO, arXiv 2503.20783).
    None when the group has no spread (equal rewards, or a single completion): it teaches nothing.
    """
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + ADVANTAGE_EPSILON) for value in centred]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A microbatch's part of the GRPO loss, and sums over its tokens for the metrics (detached, float32 scalars)."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    """Tokens that the lower bound holds back: advantage < 0 and ratio < 1 − clip_low."""
    clipped_high: Tensor
    """Tokens that the upper bound holds back: advantage > 0 and ratio > 1 + clip_high."""
    drift: Tensor
    """k3 estimate of KL(behaviour ‖ policy): ratio − 1 − log ratio."""
    kl: Tensor
    """k3 estimate of KL(policy ‖ base); 0 without reference."""


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    total_tokens: int,
    reference: Tensor | None = None,
    beta: float = 0.0,
) -> PolicyLoss:
    """Token-level clipped surrogate with separate bounds (DAPO, arXiv 2503.14476, eq. 8), plus β·KL to the base.

    Σ_t [−min(r·A, clip(r, 1−low, 1+high)·A) + β·k3] / total_tokens, with r = π_θ/π_behaviour of the sampled token and
    k3 = exp(ref − logp) − (ref − logp) − 1 (Schulman, "Approximating KL divergence").

    Args:
        logprobs: [N] float32 under the policy being trained, with gradient.
        behaviour: [N] float32 under the policy that sampled.
        advantages: [N] float32, the advantage of each token's completion.
        total_tokens: tokens of the whole optimizer step.
        reference: [N] float32 under the base model, when ``beta`` is above 0.
    """
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(per_token)
    if reference is not None:
        difference = reference - logprobs
        kl = difference.exp() - difference - 1.0
        per_token = per_token + beta * kl
    loss = per_token.sum() / total_tokens
    with torch.no_grad():
        low = (advantages < 0) & (ratio < 1.0 - clip_low)
        high = (advantages > 0) & (ratio > 1.0 + clip_high)
        return PolicyLoss(
            loss=loss,
            ratio=ratio.sum(),
            clipped_low=low.sum().float(),
            clipped_high=high.sum().float(),
            drift=(ratio - 1.0 - log_ratio).sum(),
            kl=kl.sum(),
        )
