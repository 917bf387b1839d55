"""Experts of a layer against float64, cut for few rows and for many."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.experts.configs import Cut, Grouped, GroupTile, Streamed, StreamTile
from kernels.gpu.experts.mlp import ExpertMatrices, pass_experts
from kernels.gpu.experts.routing import route
from kernels.gpu.linear.skinny import Norm, Scaled
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.experts.support import Experts

STREAMED = Streamed(StreamTile(16, 1, warps=1), StreamTile(8, 2, warps=1))
FEW = Grouped(GroupTile(16, 32, 128, warps=2, stages=2), GroupTile(16, 64, 128, warps=2, stages=2))
FLOAT8 = Grouped(GroupTile(16, 64, 128, warps=2, stages=2), GroupTile(16, 32, 128, warps=2, stages=2), float8=True)
COUNT, CHOSEN, HIDDEN, SIZE = 5, 2, 256, 128


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("cut", "rows", "kind", "shared"),
    [
        *((cut, rows, kind, True) for cut, rows in ((STREAMED, 2), (FEW, 19)) for kind in ("none", "fp8", "int4")),
        (STREAMED, 2, "none", False),
        (FEW, 19, "int4", False),
        (FLOAT8, 19, "fp8", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_the_sum_of_their_experts(
    device: torch.device, cut: Cut, rows: int, kind: str, dtype: torch.dtype, shared: bool
) -> None:
    torch.manual_seed(0)
    experts = Experts.random(COUNT, HIDDEN, SIZE, kind, dtype, device)
    x = torch.randn(rows, HIDDEN, device=device).to(dtype)
    logits = torch.randn(rows, COUNT + 1, device=device)
    logits[:, 3] -= 50  # an expert without rows
    routes = route(logits, CHOSEN, shared=shared)
    stream = torch.randn(rows, HIDDEN, device=device).to(dtype)
    expected = stream.double() + experts.reference(x, routes)
    matrices = ExpertMatrices(experts.gate_up, experts.down, experts.shared if shared else None)
    before = stream.clone()
    assert pass_experts(stream, x, routes, matrices, cut) is None
    error = (stream.double() - expected).abs().max() / (expected - before.double()).abs().max()
    assert error < (0.1 if cut is FLOAT8 else 2e-2 if dtype == torch.bfloat16 else 1e-5), error


@pytest.mark.parametrize("cut", [STREAMED, FEW])
def test_rows_come_through_a_norm_and_are_made_ready_for_the_next(device: torch.device, cut: Cut) -> None:
    torch.manual_seed(1)
    rows = 4
    experts = Experts.random(COUNT, HIDDEN, SIZE, "none", torch.float32, device)
    values, squares = torch.randn(rows, HIDDEN, device=device), torch.rand(2, rows, device=device) * HIDDEN
    normed = values / (squares.sum(0)[:, None] / HIDDEN + 1e-3).sqrt()
    routes = route(torch.randn(rows, COUNT + 1, device=device), CHOSEN)
    stream = torch.randn(rows, HIDDEN, device=device)
    expected = stream.double() + experts.reference(normed, routes)
    following = Norm(torch.rand(HIDDEN, device=device) + 0.5, 1e-6)
    matrices = ExpertMatrices(experts.gate_up, experts.down)
    made = pass_experts(stream, Scaled(values, squares, 1e-3), routes, matrices, cut, ahead=following)
    torch.testing.assert_close(stream.double(), expected, atol=1e-4, rtol=1e-4)
    assert made is not None
    torch.testing.assert_close(made.values, stream * following.weight)
    torch.testing.assert_close(made.squares.sum(0), stream.square().sum(1))


def test_inputs_that_no_group_fills(device: torch.device) -> None:
    """Widths of tests' models: plain weights need not come in groups of 128."""
    torch.manual_seed(2)
    for cut, rows in ((STREAMED, 2), (FEW, 9)):
        experts = Experts.random(3, 48, 20, "none", torch.float32, device)
        x = torch.randn(rows, 48, device=device)
        routes = route(torch.randn(rows, 4, device=device), 2, shared=True)
        stream = torch.zeros(rows, 48, device=device)
        pass_experts(stream, x, routes, ExpertMatrices(experts.gate_up, experts.down, experts.shared), cut)
        torch.testing.assert_close(stream.double(), experts.reference(x, routes), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_others(device: torch.device) -> None:
    torch.manual_seed(3)
    experts = Experts.random(COUNT, HIDDEN, SIZE, "fp8", torch.bfloat16, device)
    matrices = ExpertMatrices(experts.gate_up, experts.down)
    x = torch.randn(19, HIDDEN, device=device).bfloat16()
    logits = torch.randn(19, COUNT + 1, device=device)

    def result(rows: list[int]) -> torch.Tensor:
        stream = torch.zeros(len(rows), HIDDEN, dtype=torch.bfloat16, device=device)
        pass_experts(stream, x[rows], route(logits[rows], CHOSEN), matrices, FEW)
        return stream

    together = result(list(range(19)))
    assert torch.equal(result([7]), together[7:8])
    assert torch.equal(result([18, 3, 7]), together[[18, 3, 7]])
