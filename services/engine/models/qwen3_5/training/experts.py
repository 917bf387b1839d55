"""Experts of a layer in a training step on the GPU: forward, and backward in their input. Nothing of theirs is trained.

The plain twin is `qwen3_5.experts.pass_experts`, differentiated by autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.activations import swiglu
from kernels.gpu.experts.backward import activation_backward, grouped_input_grad
from kernels.gpu.experts.configs import ExpertShape, GroupTile, training
from kernels.gpu.experts.grouped import grouped_product
from kernels.gpu.experts.groups import Groups, group
from kernels.gpu.experts.mlp import combine
from kernels.gpu.experts.routing import route, route_backward
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.skinny import weight_kind
from services.engine.models.qwen3_5.weights import ExpertWeights


@dataclass(slots=True)
class ExpertsInside:
    """What is between the products of a layer's experts."""

    logits: Tensor
    """[T, experts + 1], of the router."""
    groups: Groups
    gate_up: Tensor
    """[T · chosen, 2 · size]."""


class TrainedThrough:
    """Experts of one layer, gone through in both directions."""

    def __init__(self, weights: ExpertWeights, device: DeviceLimits) -> None:
        self._weights, self._device = weights, device

    def inside(self, normed: Tensor) -> ExpertsInside:
        """Routing and the first product.

        Args:
            normed: [T, hidden], the MLP's input.
        """
        logits = torch.mm(normed, self._weights.router.dense().t())
        groups = group(route(logits, self._weights.per_token))
        tile, _ = self._tiles(normed)
        gate_up = grouped_product(normed, groups, self._weights.gate_up.weight, tile, gather=True)
        return ExpertsInside(logits, groups, gate_up)

    def add_to(self, out: Tensor, normed: Tensor, inside: ExpertsInside) -> None:
        """``out`` [T, hidden] plus the weighted sum of what its experts make of each token, in place."""
        tile, _ = self._tiles(normed)
        active = swiglu(inside.gate_up)
        combine(
            grouped_product(active, inside.groups, self._weights.down.weight, tile, weighted=True), len(out), onto=out
        )

    def backward(
        self, normed: Tensor, inside: ExpertsInside, grad: Tensor, active: Tensor, active_grad: Tensor
    ) -> Tensor:
        """Gradient in the MLP's input by way of experts and router, [T, hidden].

        Args:
            inside: its gate_up is used up.
            grad: [T, hidden], in the MLP's output.
            active: [T, width]: the shared expert's activation before its gate.
            active_grad: [T, width]: the gradient behind the gate; becomes that before it, in place.
        """
        _, tile = self._tiles(normed)
        groups, routes = inside.groups, inside.groups.routes
        down_grad = grouped_input_grad(grad, groups, self._weights.down.weight, tile, gather=True)
        weight_grads = activation_backward(inside.gate_up, down_grad, routes.weights)
        parts = grouped_input_grad(inside.gate_up, groups, self._weights.gate_up.weight, tile)
        logits_grad = route_backward(inside.logits, routes, weight_grads, active, active_grad)
        return combine(parts, len(normed)).addmm_(logits_grad, self._weights.router.dense())

    def _tiles(self, x: Tensor) -> tuple[GroupTile, GroupTile]:
        weights = self._weights
        shape = ExpertShape(
            weights.count,
            weights.per_token,
            weights.gate_up.shape[1],
            weights.down.shape[1],
            weight_kind(weights.gate_up.weight),
            x.dtype.itemsize,
        )
        return training(len(x), shape, self._device)


def gate(inside: ExpertsInside) -> Tensor:
    """[T, 1]: the factor of the shared expert."""
    return torch.sigmoid(inside.logits[:, -1:])
