"""Gaps between the engine's and the trainer's log-probabilities of one policy.

They compute the same function in two ways: one token at a time with a recurrent state and batches of all sorts, or a
whole sequence in chunks. Where the policy is the same, what is left of the importance ratio is this difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.losses.logprobs import bounded, importance_ratio

LOW, HIGH = 0.9, 1.1
"""A ratio outside of these is counted."""


class SamplerGap:
    """Sums over tokens, on the device until somebody asks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, sampler: Tensor, trainer: Tensor, counted: Tensor | None = None) -> None:
        """Takes in tokens that were scored before any update on them.

        Args:
            sampler: [N] float32, log-probabilities that came with the rollouts.
            trainer: [N] float32, those of the same policy in the trainer.
            counted: [N] bool; None: all of them.
        """
        if counted is not None:
            sampler, trainer = sampler[counted], trainer[counted]
        difference = trainer.detach().double() - sampler.double()
        ratio = importance_ratio(difference)
        # k3 with samples of the sampler (Schulman, "Approximating KL divergence"): unbiased for KL(sampler ‖ trainer).
        k3 = ratio - 1.0 - bounded(difference)
        outside = ((ratio < LOW) | (ratio > HIGH)).sum()
        count = torch.full_like(outside, len(difference))
        self._sums += torch.stack([count, difference.abs().sum(), k3.sum(), outside])

    def metrics(self) -> dict[str, float]:
        """``sampler_trainer_logprob_difference`` (mean absolute), ``sampler_trainer_kl`` (k3) and
        ``sampler_trainer_ratio_outside`` (share of tokens); empty if there was no token."""
        count, difference, kl, outside = self._sums.tolist()
        if count == 0:
            return {}
        return {
            "sampler_trainer_logprob_difference": difference / count,
            "sampler_trainer_kl": kl / count,
            "sampler_trainer_ratio_outside": outside / count,
        }


class ForwardGap:
    """Gap between the trainer's own forward and the engine's values that stand in for it (exact_forward)."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._most = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, engine: Tensor, trainer: Tensor) -> None:
        """Both [N] float32: log-probabilities of the same tokens under the same policy."""
        difference = (trainer.detach().double() - engine.double()).abs()
        total = difference.sum()
        self._sums += torch.stack([torch.full_like(total, len(difference)), total])
        self._most = torch.maximum(self._most, difference.max())

    def metrics(self) -> dict[str, float]:
        """``forward_gap_mean`` and ``forward_gap_max``, absolute; empty if there was no token."""
        count, total = self._sums.tolist()
        return {} if count == 0 else {"forward_gap_mean": total / count, "forward_gap_max": float(self._most)}
