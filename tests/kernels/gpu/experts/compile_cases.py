"""The experts of the 35B-A3B shape as the engine launches them, for tests/kernels/gpu/test_compiles.py."""

from __future__ import annotations

import torch

from kernels.gpu.experts.configs import ExpertShape, choose
from kernels.gpu.experts.mlp import ExpertMatrices, pass_experts
from kernels.gpu.experts.routing import route
from kernels.gpu.launch.device import named
from kernels.gpu.linear.skinny import Norm, Scaled
from tests.kernels.gpu.linear.compile_cases import rows, weight

COUNT, CHOSEN, HIDDEN, SIZE = 256, 8, 2048, 512


def launches() -> None:
    norm = Norm(torch.empty(HIDDEN), 1e-6)
    for kind in ("none", "fp8", "int4"):
        shared = weight(kind, 2 * SIZE, HIDDEN), weight(kind, HIDDEN, SIZE)
        gate_up, down = weight(kind, COUNT * 2 * SIZE, HIDDEN), weight(kind, COUNT * HIDDEN, SIZE)
        shape = ExpertShape(COUNT, CHOSEN, HIDDEN, SIZE, kind, 2)
        for count in (1, 64, 2048, 8192):
            few = count <= 64
            logits = rows(count, COUNT + 1)
            routes = route(logits, CHOSEN, shared=few, active=None if few else rows(count, SIZE), pdl=True)
            x = Scaled(rows(count, HIDDEN), torch.empty(32, count), 1e-6) if few else rows(count, HIDDEN)
            matrices = ExpertMatrices(gate_up, down, shared if few else None)
            cut = choose(count, shape, named("sm90"))
            pass_experts(rows(count, HIDDEN), x, routes, matrices, cut, ahead=norm if few else None, pdl=True)
