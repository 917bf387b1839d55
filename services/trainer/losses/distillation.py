"""Losses of a student against a teacher."""

from __future__ import annotations

from torch import Tensor

from services.trainer.losses.logprobs import importance_ratio


def divergence_loss(divergences: Tensor, total_tokens: int) -> Tensor:
    """This microbatch's part of the mean divergence over ``total_tokens`` completion tokens of the step.

    Args:
        divergences: [N] float32, one a token.
    """
    return divergences.sum() / total_tokens


def sampled_reverse_kl(logprobs: Tensor, behaviour: Tensor, teacher: Tensor, total_tokens: int) -> Tensor:
    """This microbatch's part of ``−mean(r A)``: policy gradient with the advantage A = −(log s − log t) of each sampled
    token, s as it was sampled, and r = π / s the importance ratio (Tinker's importance_sampling loss; Lu et al.,
    "On-Policy Distillation", 2025).

    On policy its gradient is, on average over what is sampled, that of KL(student ‖ teacher) of each next token.

    Args:
        logprobs: [N] float32 of the sampled tokens under the policy in training; the gradient goes there.
        behaviour: [N] float32, the same as the sampler had it.
        teacher: [N] float32 under the teacher.
    """
    advantage = (teacher - behaviour).detach()
    return -(importance_ratio(logprobs - behaviour.detach()) * advantage).sum() / total_tokens
