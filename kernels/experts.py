"""A mixture of experts: each token passes a few of many small gated MLPs, which a router chooses. Plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activations import swiglu

ExpertLinear = Callable[[Tensor, int], Tensor]
"""Linear map of one expert: [n, in] to [n, out], of the expert of that number."""


def route(logits: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """The experts that each token passes, and their weights: the likeliest by a softmax over all experts, whose
    probabilities are divided by their sum (Qwen3 technical report, arXiv 2505.09388, as transformers computes it).

    Args:
        logits: [T, experts], differentiable.
        per_token: experts that are chosen.

    Returns:
        [T, per_token] int64, the likeliest first, and [T, per_token] in the dtype of the logits.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, chosen = torch.topk(probabilities, per_token, dim=-1)
    return chosen, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype)


def pass_through(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear) -> Tensor:
    """The weighted sum of what its experts make of each token, expert by expert; differentiable in x and weights.

    Args:
        x: [T, hidden].
        chosen, weights: [T, per_token], of route().
        gate_up: hidden to an expert's gate | up.
        down: an expert's width to hidden.

    Returns:
        [T, hidden].
    """
    result = torch.zeros_like(x)
    pairs = chosen.flatten()
    order = torch.argsort(pairs, stable=True)
    experts, counts = torch.unique_consecutive(pairs[order], return_counts=True)
    for expert, run in zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True):
        rows = run // chosen.shape[1]
        made = down(swiglu(gate_up(x.index_select(0, rows), expert)), expert)
        result = result.index_add(0, rows, made * weights.flatten()[run, None])
    return result
