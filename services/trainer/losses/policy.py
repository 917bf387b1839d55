"""Loss types of GRPO jobs: group-relative advantages, surrogates of policy optimisation, and what the sum over the
tokens of an optimizer step is divided by.

A new loss type is a ``PolicyLossType`` in a module of its own and a line in
services/common/jobs/kinds/loss_types.py, which names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from services.common.jobs.kinds.loss_types import LOSS_TYPES, LossType
from services.common.jobs.trajectories.credit import Credit
from services.trainer.losses.logprobs import bounded, importance_ratio, per_row, sequence_sums

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


def turn_advantages(
    credit: Credit, rewards: Sequence[Sequence[float]], *, scale: bool, std: float | None = None
) -> list[list[float]] | None:
    """Advantages of the turns of each member of a group: `group_advantages` of each comparison that ``credit`` makes.

    None when no comparison has a spread; a turn whose comparison has none gets 0.

    Args:
        rewards: of the turns of each member.
    """
    columns = [
        group_advantages(values, scale=scale, std=std) if credit.differs(values) else None
        for values in credit.compared(rewards)
    ]
    if all(column is None for column in columns):
        return None
    of_member = [[0.0 if column is None else column[member] for column in columns] for member in range(len(rewards))]
    if credit.level == "trajectory":
        return [values * len(turns) for values, turns in zip(of_member, rewards, strict=True)]
    return [values[: len(turns)] for values, turns in zip(of_member, rewards, strict=True)]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The trained tokens of a microbatch, completion after completion; tensors are [N] float32."""

    logprobs: Tensor
    """Under the policy in training, with gradient."""
    advantages: Tensor
    """The advantage of each token's completion."""
    log_ratio: Tensor
    """log π_θ/π_behaviour of the token."""
    ratio: Tensor
    """Exponential of the log-ratio, which is bounded."""
    lengths: Sequence[int] | None
    """Tokens of each completion, which add up to N."""
    clip_low: float
    clip_high: float
    cispo_max_ratio: float


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Losses of a microbatch's tokens by a loss type; all [N]."""

    per_token: Tensor
    """float32: the loss of each token, with gradient."""
    ratio: Tensor
    """float32: the ratio that was bounded."""
    low: Tensor
    """bool: the lower bound holds the token back."""
    high: Tensor
    """bool: the upper bound does."""


def clipped_tokens(tokens: PolicyTokens) -> Surrogate:
    """−min(r·A, clip(r, 1−low, 1+high)·A), with separate bounds (DAPO, arXiv 2503.14476, eq. 8)."""
    return _clipped(tokens, tokens.ratio)


def clipped_sequences(tokens: PolicyTokens) -> Surrogate:
    """Clipping as of tokens, with s = exp(mean over the completion of log r) for r (GSPO, arXiv 2507.18071, eq. 5-7).

    Raises:
        ValueError: there are no lengths.
    """
    if tokens.lengths is None:
        raise ValueError("clipping of sequences needs the lengths of the completions")
    lengths = torch.tensor(tokens.lengths, device=tokens.log_ratio.device)
    means = sequence_sums(tokens.log_ratio, tokens.lengths) / lengths
    return _clipped(tokens, per_row(importance_ratio(means), tokens.lengths))


def _clipped(tokens: PolicyTokens, ratio: Tensor) -> Surrogate:
    advantages = tokens.advantages
    clipped = ratio.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high)
    return Surrogate(
        per_token=-torch.minimum(ratio * advantages, clipped * advantages),
        ratio=ratio,
        low=(advantages < 0) & (ratio.detach() < 1.0 - tokens.clip_low),
        high=(advantages > 0) & (ratio.detach() > 1.0 + tokens.clip_high),
    )


def weighted_logprobs(tokens: PolicyTokens) -> Surrogate:
    """−sg(min(r, cispo_max_ratio))·A·log π_θ (CISPO: MiniMax-M1, arXiv 2506.13585, eq. 4-5, without its lower bound):
    no token's gradient vanishes, however far its ratio."""
    weights = tokens.ratio.detach().clamp(max=tokens.cispo_max_ratio)
    return Surrogate(
        per_token=-weights * tokens.advantages * tokens.logprobs,
        ratio=tokens.ratio,
        low=torch.zeros_like(tokens.advantages, dtype=torch.bool),
        high=tokens.ratio.detach() > tokens.cispo_max_ratio,
    )


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Completions of one group of an optimizer step."""

    completions: int
    """Number of all completions, those that nothing is learnt from included."""
    lengths: Sequence[int]
    """Trained tokens of each completion that is learnt from."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or len(self.lengths) > self.completions:
            raise ValueError(f"a group of {self.completions} completions cannot train {list(self.lengths)[:8]} tokens")


def token_mean(groups: Sequence[GroupSize], max_length: int) -> list[float]:
    """1/T, a mean over tokens (arXiv 2503.14476, eq. 8; arXiv 2506.13585, eq. 4)."""
    del max_length
    return [1.0 for group in groups for _ in group.lengths]


def completion_mean(groups: Sequence[GroupSize], max_length: int) -> list[float]:
    """1/(S · its length), a mean over completions of means over tokens (arXiv 2402.03300, eq. 3; arXiv 2507.18071,
    eq. 5)."""
    del max_length
    total, completions = _totals(groups)
    return [total / (completions * length) for group in groups for length in group.lengths]


def constant_length(groups: Sequence[GroupSize], max_length: int) -> list[float]:
    """1/(S · max_length), a constant (arXiv 2503.20783, §3.2)."""
    total, completions = _totals(groups)
    return [total / (completions * max_length) for group in groups for _ in group.lengths]


def group_mean(groups: Sequence[GroupSize], max_length: int) -> list[float]:
    """1/(G · tokens of its group), a mean over groups of means over their tokens. TRL normalises by the tokens of the
    microbatch, and so depends on how a step is cut; this is the same with one group a microbatch."""
    del max_length
    total, _ = _totals(groups)
    return [total / (len(groups) * sum(group.lengths)) for group in groups for _ in group.lengths]


def _totals(groups: Sequence[GroupSize]) -> tuple[int, int]:
    """Trained tokens, and completions, of a step."""
    return sum(sum(group.lengths) for group in groups), sum(group.completions for group in groups)


@dataclass(frozen=True, slots=True)
class PolicyLossType:
    """Loss type of GRPO jobs."""

    surrogate: Callable[[PolicyTokens], Surrogate] = clipped_tokens
    completion_weights: Callable[[Sequence[GroupSize], int], list[float]] = token_mean
    """Makes the weight of each trained completion's tokens, in order, of the step's groups and max_completion_length.

    A token of loss l adds weight · l / T to the step's loss, T being the trained tokens of the step. Other names in the
    formulas: S completions in the step's G groups.
    """


GRPO = PolicyLossType(clipped_tokens, completion_mean)
DAPO = PolicyLossType(clipped_tokens, token_mean)
DR_GRPO = PolicyLossType(clipped_tokens, constant_length)
BNPO = PolicyLossType(clipped_tokens, group_mean)
CISPO = PolicyLossType(weighted_logprobs, token_mean)
GSPO = PolicyLossType(clipped_sequences, completion_mean)


def policy_loss_type(name: LossType) -> PolicyLossType:
    """The loss type of this name."""
    module, attribute = LOSS_TYPES[name].implementation.split(":")
    found: PolicyLossType = getattr(import_module(module), attribute)
    return found


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
    surrogate: Callable[[PolicyTokens], Surrogate] = clipped_tokens,
    lengths: Sequence[int] | None = None,
    cispo_max_ratio: float = math.inf,
    weights: Tensor | None = None,
    correction: Tensor | None = None,
    unbiased_kl: bool = False,
) -> PolicyLoss:
    """Σ_t weight · (correction · l_t + β · KL_t) / total_tokens, with l_t of ``surrogate``, from r = π_θ/π_behaviour of
    the sampled token.

    KL_t is k3 = exp(ref − logp) − (ref − logp) − 1 (Schulman, "Approximating KL divergence"); ``unbiased_kl``
    multiplies it by r, so that its gradient is that of the KL also off policy (DeepSeek-V3.2, arXiv 2512.02556).

    Log-ratios count up to `services.trainer.losses.logprobs.MOST_NATS`, so that every loss is a number.

    Args:
        logprobs: [N] float32 under the policy being trained, with gradient.
        behaviour: [N] float32 under the policy that sampled.
        advantages: [N] float32, the advantage of each token's completion.
        total_tokens: tokens of the whole optimizer step.
        reference: [N] float32 under the base model, when ``beta`` is above 0.
        lengths: tokens of each completion, which add up to N; for clipping of sequences.
        weights: [N] float32, of `PolicyLossType.completion_weights`; None: 1, a mean over the step's tokens.
        correction: [N] float32, of `mismatch_weights`; None: 1.
    """
    log_ratio = logprobs - behaviour
    token_ratio = importance_ratio(log_ratio)
    found = surrogate(
        PolicyTokens(logprobs, advantages, log_ratio, token_ratio, lengths, clip_low, clip_high, cispo_max_ratio)
    )
    per_token = found.per_token
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
            ratio=found.ratio.sum(),
            clipped_low=found.low.sum().float(),
            clipped_high=found.high.sum().float(),
            drift=(token_ratio - 1.0 - bounded(log_ratio)).sum(),
            kl=kl.sum(),
        )
