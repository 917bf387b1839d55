"""The experts of the 35B-A3B shape as the engine launches them, for tests/kernels/gpu/test_compiles.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.activations import swiglu
from kernels.gpu.experts.backward import activation_backward, grouped_input_grad
from kernels.gpu.experts.configs import ExpertShape, GroupTile, choose, training
from kernels.gpu.experts.grouped import grouped_product
from kernels.gpu.experts.groups import group
from kernels.gpu.experts.mlp import ExpertMatrices, combine, pass_experts
from kernels.gpu.experts.routing import route, route_backward
from kernels.gpu.launch.device import named
from kernels.gpu.linear.skinny import Norm, Scaled, Weight
from tests.kernels.gpu.linear.compile_cases import rows, weight

COUNT, CHOSEN, HIDDEN, SIZE = 256, 8, 2048, 512


def _trains(x: Tensor, gate_up: Weight, down: Weight, tiles: tuple[GroupTile, GroupTile]) -> None:
    """Forward and backward as services.engine.models.qwen3_5.training.experts launches them."""
    forward, backward = tiles
    logits = rows(len(x), COUNT + 1)
    groups = group(route(logits, CHOSEN))
    inner = grouped_product(x, groups, gate_up, forward, gather=True)
    combine(grouped_product(swiglu(inner), groups, down, forward, weighted=True), len(x), onto=x)
    grad = grouped_input_grad(x, groups, down, backward, gather=True)
    weight_grads = activation_backward(inner, grad, groups.routes.weights)
    combine(grouped_input_grad(inner, groups, gate_up, backward), len(x))
    route_backward(logits, groups.routes, weight_grads, rows(len(x), SIZE), rows(len(x), SIZE))


def launches(architecture: str = "sm90") -> None:
    """Those of a start and of training on a card of that architecture."""
    device = named(architecture)
    norm, pdl = Norm(torch.empty(HIDDEN), 1e-6), device.programmatic_launch
    for kind in ("none", "fp8", "int4") if device.float8 else ("none", "int4"):
        shared = weight(kind, 2 * SIZE, HIDDEN), weight(kind, HIDDEN, SIZE)
        gate_up, down = weight(kind, COUNT * 2 * SIZE, HIDDEN), weight(kind, COUNT * HIDDEN, SIZE)
        shape = ExpertShape(COUNT, CHOSEN, HIDDEN, SIZE, kind, 2)
        for count in (512, 8192):
            _trains(rows(count, HIDDEN), gate_up, down, training(count, shape, device))
        for count in (1, 64, 2048, 8192):
            few = count <= 64
            logits = rows(count, COUNT + 1)
            routes = route(logits, CHOSEN, shared=few, active=None if few else rows(count, SIZE), pdl=pdl)
            x = Scaled(rows(count, HIDDEN), torch.empty(32, count), 1e-6) if few else rows(count, HIDDEN)
            matrices = ExpertMatrices(gate_up, down, shared if few else None)
            cut = choose(count, shape, device)
            pass_experts(rows(count, HIDDEN), x, routes, matrices, cut, ahead=norm if few else None, pdl=pdl)
