"""Losses over sequence log-probabilities: direct preference optimisation and Kahneman-Tversky optimisation.

The implicit reward of a completion y to a prompt x is β log π(y|x)/π_ref(y|x) (arXiv 2305.18290, eq. 5); log π(y|x) is
the sum over the completion's tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """−(1−ε) log σ(β(Δ_c − Δ_r)) − ε log σ(−β(Δ_c − Δ_r)), a pair (arXiv 2305.18290, eq. 7; with ε the conservative
    form of its author, "A note on DPO with noisy preferences").

    Args:
        chosen: [P] log π/π_ref of the better completions.
        rejected: [P] of the others.
        label_smoothing: ε.

    Returns:
        [P], to be divided by the pairs of the whole optimizer step.
    """
    margin = beta * (chosen - rejected)
    return -(1.0 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def kto_reference_point(mismatched: Tensor) -> Tensor:
    """z₀: max(0, mean log π/π_ref of completions under prompts they do not belong to), detached (arXiv 2402.01306,
    §4.1: an estimate of KL(π ‖ π_ref), biased and cheap; through it no gradient flows). TRL's KTOTrainer has the same.

    Args:
        mismatched: [E], of the whole optimizer step.
    """
    return mismatched.detach().mean().clamp(min=0.0)


def kto_loss(
    log_ratios: Tensor,
    labels: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """λ_D (1 − σ(β(Δ − z₀))) of a desirable completion, λ_U (1 − σ(β(z₀ − Δ))) of an undesirable one (arXiv 2402.01306,
    §4, without its constant λ_y).

    Args:
        log_ratios: [E] Δ = log π/π_ref.
        labels: [E] bool, desirable or not.
        reference_point: scalar z₀ of the whole step.

    Returns:
        [E], to be divided by the examples of the whole optimizer step.
    """
    away = beta * (log_ratios - reference_point)
    desirable = desirable_weight * torch.sigmoid(-away)
    undesirable = undesirable_weight * torch.sigmoid(away)
    return torch.where(labels, desirable, undesirable)
