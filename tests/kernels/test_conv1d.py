"""The causal convolution against a loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.conv1d import ConvLayout, causal_conv_packed, causal_conv_step


def sequential(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """One segment: x [T, C], weight [kernel, C], past [C, kernel - 1]."""
    history = torch.cat((past.t(), x))
    kernel = len(weight)
    rows = [(history[t : t + kernel] * weight).sum(0) for t in range(len(x))]
    return torch.nn.functional.silu(torch.stack(rows)), history[len(history) - kernel + 1 :].t()


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[1], [2], [9], [3, 1, 12, 2, 1]])
@pytest.mark.parametrize("carried", [True, False])
def test_packed(kernel: int, lengths: list[int], carried: bool) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(sum(lengths), 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(kernel, 6, dtype=torch.float64, generator=generator)
    state = torch.randn(len(lengths), 6, kernel - 1, dtype=torch.float64, generator=generator)
    layout = ConvLayout.build(lengths, kernel, torch.device("cpu"))
    single = x.detach().float().requires_grad_()
    out, final = causal_conv_packed(single, weight.float(), layout, state.float() if carried else None)
    out.square().sum().backward()
    pieces = []
    for index, part in enumerate(x.split(lengths)):
        past = state[index] if carried else torch.zeros_like(state[index])
        expected, last = sequential(part, weight, past)
        torch.testing.assert_close(final[index].double(), last, atol=1e-6, rtol=0)
        pieces.append(expected)
    torch.testing.assert_close(out.double(), torch.cat(pieces), atol=1e-5, rtol=0)
    torch.cat(pieces).square().sum().backward()
    assert single.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(single.grad.double(), x.grad, atol=1e-4, rtol=1e-4)


def test_step() -> None:
    x, weight, state = torch.randn(5, 6), torch.randn(4, 6), torch.randn(5, 6, 3)
    out, new = causal_conv_step(x, weight, state)
    for row in range(5):
        expected, last = sequential(x[row : row + 1].double(), weight.double(), state[row].double())
        torch.testing.assert_close(out[row].double(), expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(new[row].double(), last, atol=0, rtol=0)
