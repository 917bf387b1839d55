"""Gradients through experts against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.experts.backward import activation_backward, grouped_input_grad
from kernels.gpu.experts.configs import GroupTile
from kernels.gpu.experts.groups import group
from kernels.gpu.experts.routing import route
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.experts.support import exact, stored

TILE = GroupTile(16, 128, 32, warps=2, stages=2)


@pytest.mark.parametrize("kind", ["none", "fp8", "int4"])
@pytest.mark.parametrize("gather", [True, False])
def test_gradient_in_the_inputs(device: torch.device, kind: str, gather: bool) -> None:
    torch.manual_seed(0)
    count, chosen, rows, outputs, inputs = 4, 2, 11, 40, 256
    weight = stored(torch.randn(count * outputs, inputs, device=device) / 8, kind)
    routes = route(torch.randn(rows, count + 1, device=device), chosen)
    grad = torch.randn(rows if gather else rows * chosen, outputs, device=device)
    out = grouped_input_grad(grad, group(routes), weight, TILE, gather=gather)
    each = exact(weight).view(count, outputs, inputs)
    spread = grad.repeat_interleave(chosen, 0) if gather else grad
    expected = torch.stack(
        [g.double() @ each[e] for g, e in zip(spread, routes.experts.flatten().tolist(), strict=True)]
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="does not fit"):
        grouped_input_grad(grad, group(routes), weight, TILE, gather=not gather)


def test_gradient_in_inputs_that_no_group_fills(device: torch.device) -> None:
    torch.manual_seed(1)
    weight = torch.randn(3 * 20, 48, device=device)
    routes = route(torch.randn(5, 4, device=device), 1)
    grad = torch.randn(5, 20, device=device)
    out = grouped_input_grad(grad, group(routes), weight, TILE)
    picked = weight.view(3, 20, 48)[routes.experts[:, 0].long()]
    torch.testing.assert_close(out, torch.einsum("pn,pnk->pk", grad, picked), atol=1e-4, rtol=1e-4)


def test_gradients_in_activations_and_weights(device: torch.device) -> None:
    torch.manual_seed(2)
    gate_up = torch.randn(6, 40, device=device, dtype=torch.float64).requires_grad_()
    weights = torch.rand(3, 2, device=device, dtype=torch.float64).requires_grad_()
    grad = torch.randn(6, 20, device=device)
    gate, up = gate_up.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up * weights.view(6, 1) * grad).sum().backward()
    inner = gate_up.detach().float()
    found = activation_backward(inner, grad, weights.detach().float())
    assert gate_up.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(inner.double(), gate_up.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), weights.grad, atol=1e-5, rtol=1e-5)
