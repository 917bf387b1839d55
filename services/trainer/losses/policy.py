"""Group-relative advantages and the surrogates of policy optimisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from services.common.jobs.kinds.grpo import LossType
from services.trainer.losses.ratios import bounded, importance_ratio
from services.trainer.losses.sequences import per_row, sequence_sums

ADVANTAGE_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL's GRPOTrainer."""


def group_advantages(rewards: Sequence[float], *, scale: bool, std: float | None = None) -> list[float] | None:
    """GRPO's advantages (DeepSeekMath, arXiv 2402.03300, §4.1.2): rewards relative to their group.

    (R − mean) / (unbiased std + 1e-4), or R − mean when not ``scale`` (Dr. GRPO, arXiv 2503.20783).
    None when the group has no spread (equal rewards, or a single completion): it teaches nothing.

    Args:
        std: what to divide by instead of the group's own, e.g. that of the whole batch (arXiv 2508.08221).
    """
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale:
        return centred
    if std is None:
        std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + ADVANTAGE_EPSILON) for value in centred]


Form: TypeAlias = Literal["token", "sequence", "cispo"]
"""The surrogate: clipped a token, clipped a sequence, or a weight on the log-probability."""


def surrogate_form(loss_type: LossType) -> Form:
    """The surrogate of a loss type; the types differ also in `completion_weights`."""
    match loss_type:
        case "grpo" | "dapo" | "dr_grpo" | "bnpo":
            return "token"
        case "gspo":
            return "sequence"
        case "cispo":
            return "cispo"
        case _:
            assert_never(loss_type)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A microbatch's part of the GRPO loss, and sums over its tokens for the metrics (detached, float32 scalars)."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    """Tokens that the lower bound holds back: advantage < 0 and ratio < 1 − clip_low."""
    clipped_high: Tensor
    """Tokens that the upper bound holds back: advantage > 0 and ratio > 1 + clip_high; of cispo, ratio > its bound."""
    drift: Tensor
    """k3 estimate of KL(behaviour ‖ policy): ratio − 1 − log ratio, a token."""
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
    form: Form = "token",
    lengths: Sequence[int] | None = None,
    cispo_max_ratio: float = math.inf,
    weights: Tensor | None = None,
    correction: Tensor | None = None,
    unbiased_kl: bool = False,
) -> PolicyLoss:
    """Σ_t weight · (correction · l_t + β · KL_t) / total_tokens, with r = π_θ/π_behaviour of the sampled token.

    l_t by ``form``:

    - token: −min(r·A, clip(r, 1−low, 1+high)·A), with separate bounds (DAPO, arXiv 2503.14476, eq. 8).
    - sequence: the same with s = exp(mean over the completion of log r) for r (GSPO, arXiv 2507.18071, eq. 5-7).
    - cispo: −sg(min(r, cispo_max_ratio))·A·log π_θ (MiniMax-M1, arXiv 2506.13585, eq. 4-5, without its lower bound): no
      token's gradient vanishes, however far its ratio.

    KL_t is k3 = exp(ref − logp) − (ref − logp) − 1 (Schulman, "Approximating KL divergence"); ``unbiased_kl``
    multiplies it by r, so that its gradient is that of the KL also off policy (DeepSeek-V3.2, arXiv 2512.02556).

    Log-ratios count up to `services.trainer.losses.ratios.MOST_NATS`, so that every loss is a number.

    Args:
        logprobs: [N] float32 under the policy being trained, with gradient.
        behaviour: [N] float32 under the policy that sampled.
        advantages: [N] float32, the advantage of each token's completion.
        total_tokens: tokens of the whole optimizer step.
        reference: [N] float32 under the base model, when ``beta`` is above 0.
        lengths: tokens of each completion, which add up to N; for the form sequence.
        weights: [N] float32, of `completion_weights`; None: 1, a mean over the step's tokens.
        correction: [N] float32, of `mismatch_weights`; None: 1.
    """
    log_ratio = logprobs - behaviour
    token_ratio = importance_ratio(log_ratio)
    ratio = token_ratio
    low = torch.zeros_like(advantages, dtype=torch.bool)
    if form == "cispo":
        per_token = -token_ratio.detach().clamp(max=cispo_max_ratio) * advantages * logprobs
        high = ratio.detach() > cispo_max_ratio
    else:
        if form == "sequence":
            if lengths is None:
                raise ValueError("the form sequence needs the lengths of the completions")
            means = sequence_sums(log_ratio, lengths) / torch.tensor(lengths, device=log_ratio.device)
            ratio = per_row(importance_ratio(means), lengths)
        clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        low = (advantages < 0) & (ratio.detach() < 1.0 - clip_low)
        high = (advantages > 0) & (ratio.detach() > 1.0 + clip_high)
    if correction is not None:
        per_token = correction * per_token
    kl = torch.zeros_like(per_token)
    if reference is not None:
        difference = bounded(reference - logprobs)
        kl = difference.exp() - difference - 1.0
        per_token = per_token + beta * (token_ratio * kl if unbiased_kl else kl)
    if weights is not None:
        per_token = weights * per_token
    loss = per_token.sum() / total_tokens
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            ratio=ratio.sum(),
            clipped_low=low.sum().float(),
            clipped_high=high.sum().float(),
            drift=(token_ratio - 1.0 - bounded(log_ratio)).sum(),
            kl=kl.sum(),
        )
