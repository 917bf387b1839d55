"""Losses over the log-probabilities of chosen tokens: sums over tokens or sequences, divided by a count that covers the
whole optimizer step, so gradients do not depend on how a step is cut into microbatches. One module a family.
"""

from __future__ import annotations

from services.trainer.losses.distillation import divergence_loss, sampled_reverse_kl
from services.trainer.losses.logprobs import negative_log_likelihood, sequence_sums
from services.trainer.losses.mismatch import MismatchStats, mismatch_weights
from services.trainer.losses.policy import (
    GroupSize,
    PolicyLoss,
    PolicyLossType,
    group_advantages,
    policy_loss,
    policy_loss_type,
    turn_advantages,
)
from services.trainer.losses.preference import dpo_loss, kto_loss, kto_reference_point

__all__ = [
    "GroupSize",
    "MismatchStats",
    "PolicyLoss",
    "PolicyLossType",
    "divergence_loss",
    "dpo_loss",
    "group_advantages",
    "kto_loss",
    "kto_reference_point",
    "mismatch_weights",
    "negative_log_likelihood",
    "policy_loss",
    "policy_loss_type",
    "sampled_reverse_kl",
    "sequence_sums",
    "turn_advantages",
]
