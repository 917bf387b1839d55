"""The sampler and the trainer compute the same policy's log-probabilities with different kernels: how far apart they
are, and weights that make up for it ("truncated importance sampling", Yao et al. 2025; TRL's GRPOTrainer, vLLM part).

The decoupled objective (arXiv 2110.00641): the ratio is against the trainer's own log-probabilities of the policy that
sampled, and each token's or sequence's surrogate is multiplied by trainer/sampler, detached, up to a cap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.common.jobs.kinds.grpo import MismatchCorrection
from services.trainer.losses.logprob_gap import SamplerGap
from services.trainer.losses.logprobs import importance_ratio, per_row, sequence_sums


def mismatch_weights(
    old: Tensor, behaviour: Tensor, lengths: Sequence[int], *, correction: MismatchCorrection, cap: float
) -> tuple[Tensor, Tensor]:
    """The weight of each token's surrogate, and whether its ratio is over the cap.

    Args:
        old: [N] float32, the trainer's log-probabilities of the policy that sampled.
        behaviour: [N] float32, the sampler's.
        lengths: tokens of each completion; they add up to N.
        correction: "token_…": exp(old − behaviour) of each token; "sequence_…": of the sum over the completion.
            "…_truncate": at most ``cap``; "…_mask": 0 over the cap.

    Returns:
        [N] float32 and [N] bool.
    """
    difference = old - behaviour
    if correction == "none":
        return torch.ones_like(difference), torch.zeros_like(difference, dtype=torch.bool)
    level, action = correction.split("_")
    if level == "sequence":
        difference = per_row(sequence_sums(difference, lengths), lengths)
    ratio = importance_ratio(difference)
    outside = ratio > cap
    return (ratio.clamp(max=cap) if action == "truncate" else ratio.masked_fill(outside, 0.0)), outside


class MismatchStats:
    """Over the tokens of a step whose sampler said how likely they were.

    Args:
        device: of the tensors that are added.
        correction: whether weights are reported.
    """

    def __init__(self, device: torch.device, correction: MismatchCorrection) -> None:
        self._correction = correction
        self._agreement = SamplerGap(device)
        self._sums = torch.zeros(3, device=device)
        self._least = torch.full((), float("inf"), device=device)
        self._most = torch.full((), float("-inf"), device=device)

    @torch.no_grad()
    def add(self, old: Tensor, behaviour: Tensor, weights: Tensor, outside: Tensor, recorded: Tensor) -> None:
        """All [N]: see `mismatch_weights`; ``recorded`` says where ``behaviour`` is the sampler's own."""
        self._agreement.add(behaviour, old, recorded)
        weights = weights[recorded]
        self._sums += torch.stack([recorded.sum().float(), weights.sum(), outside[recorded].sum().float()])
        if weights.numel():
            self._least = torch.minimum(self._least, weights.min())
            self._most = torch.maximum(self._most, weights.max())

    def metrics(self) -> dict[str, float]:
        """Metrics of the distance between sampler and trainer, and of the correction if there is one. Empty when no
        rollout came with log-probabilities."""
        count, weights, outside = self._sums.tolist()
        if count == 0:
            return {}
        found = self._agreement.metrics()
        if self._correction != "none":
            found |= {
                "mismatch_weight_mean": weights / count,
                "mismatch_weight_min": float(self._least),
                "mismatch_weight_max": float(self._most),
                "mismatch_fraction_outside": outside / count,
            }
        return found
