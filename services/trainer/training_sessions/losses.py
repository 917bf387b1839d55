"""The losses of sessions, as in Tinker: weighted sums over tokens, never means, so that the caller scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.jobs.training_sessions.calls import Loss, LossConfig

DEFAULT_CLIP = 0.2
"""PPO's ε (Schulman et al., arXiv 1707.06347, §6.1)."""
DEFAULT_CAP = 5.0
"""CISPO's upper bound as TRL sets it."""
DEFAULT_BETA = 0.1
"""Weight of DRO's squared log-ratio as Tinker sets it."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of a microbatch, and detached sums over its tokens for the metrics."""

    loss: Tensor
    sums: dict[str, Tensor]


def token_loss(
    kind: Loss,
    config: LossConfig,
    logprobs: Tensor,
    weights: Tensor,
    advantages: Tensor | None,
    behaviour: Tensor | None,
) -> TokenLoss:
    """Σ w·l over the tokens of a microbatch; all tensors are [N] float32. With r = π_θ/π_behaviour of the token:

    cross_entropy        l = −logp
    importance_sampling  l = −r·A
    ppo                  l = −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)   (arXiv 1707.06347, eq. 7)
    cispo                l = −sg(clip(r, floor, cap))·A·logp                     (MiniMax-M1, arXiv 2506.13585, eq. 4)
    dro                  l = −(A·logp − β/2·(log r)²)                            (arXiv 2405.19107, eq. 5)

    Raises:
        ValueError: a ratio is needed and advantages or behaviour log-probabilities are missing.
    """
    if kind == "cross_entropy":
        return TokenLoss(-(weights * logprobs).sum(), {})
    if advantages is None or behaviour is None:
        raise ValueError(f"the loss {kind} needs advantages and log-probabilities of the behaviour policy")
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    high = low = torch.zeros_like(ratio, dtype=torch.bool)
    if kind == "importance_sampling":
        losses = -ratio * advantages
    elif kind == "ppo":
        floor = 1.0 - (DEFAULT_CLIP if config.clip_low is None else config.clip_low)
        ceiling = 1.0 + (DEFAULT_CLIP if config.clip_high is None else config.clip_high)
        losses = -torch.minimum(ratio * advantages, ratio.clamp(floor, ceiling) * advantages)
        low, high = (advantages < 0) & (ratio < floor), (advantages > 0) & (ratio > ceiling)
    elif kind == "dro":
        beta = DEFAULT_BETA if config.beta is None else config.beta
        losses = 0.5 * beta * log_ratio.square() - advantages * logprobs
    else:
        cap, floor = DEFAULT_CAP if config.cap is None else config.cap, config.floor or 0.0
        losses = -ratio.detach().clamp(floor, cap) * advantages * logprobs
        high = ratio > cap
    with torch.no_grad():
        sums = {"ratio_mean": ratio.sum(), "behaviour_kl": (ratio - 1.0 - log_ratio).sum()}
        if kind == "ppo":
            sums["clip_fraction_low"] = low.sum().float()
        if kind in ("ppo", "cispo"):
            sums["clip_fraction_high"] = high.sum().float()
    return TokenLoss((weights * losses).sum(), {name: value.detach() for name, value in sums.items()})
