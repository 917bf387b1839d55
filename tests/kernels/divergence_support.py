"""The divergence of GKD as TRL writes it, over full logits in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """[N] of [N, vocab] logits: trl.experimental.gkd's generalized_jsd_loss, summed over the vocabulary."""
    s = F.log_softmax(student / temperature, dim=-1)
    t = F.log_softmax(teacher / temperature, dim=-1)
    if beta == 0:
        return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(t, s, reduction="none", log_target=True).sum(-1)
    mixture = torch.logsumexp(torch.stack([s + math.log1p(-beta), t + math.log(beta)]), dim=0)
    of_teacher = F.kl_div(mixture, t, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, s, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)
