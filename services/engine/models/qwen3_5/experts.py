"""The experts of a layer in plain torch, in serving and in training."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.experts import pass_through, route
from services.engine.models.qwen3_5.weights import ExpertWeights
from services.engine.models.weights.matrix import Matrix


def pass_experts(
    normed: Tensor, weights: ExpertWeights, linear: Callable[[Tensor, Matrix, slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """The sum of what the chosen experts make of each token, and the gate of the shared expert.

    Args:
        normed: [T, hidden], the MLP's input.
        linear: product of rows with some rows of a matrix.

    Returns:
        [T, hidden], and [T, 1]: the factor of the shared expert's output, or just as well of what its last linear map
        reads.
    """
    logits = F.linear(normed, weights.router.dense())
    chosen, shares = route(logits[:, :-1], weights.per_token)

    def of(matrix: Matrix) -> Callable[[Tensor, int], Tensor]:
        rows = matrix.shape[0] // weights.count
        return lambda x, expert: linear(x, matrix, slice(expert * rows, (expert + 1) * rows))

    return pass_through(normed, chosen, shares, of(weights.gate_up), of(weights.down)), torch.sigmoid(logits[:, -1:])
