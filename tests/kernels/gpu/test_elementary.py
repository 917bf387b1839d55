"""Elementary functions within a few ulp of float64, over all that a model can ask them for."""

# Triton's language has no annotations that mypy knows.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import exponential, inverse_root, sigmoid, silu, softplus
from tests.kernels.gpu import interpreter  # noqa: F401

_EXACT = {
    "exponential": torch.exp,
    "inverse_root": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": lambda x: torch.where(x > 0, x, 0) + torch.log1p(torch.exp(-x.abs())),
}


@triton.jit
def _apply(x, out, NAME: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    if NAME == "exponential":
        value = exponential(value)
    elif NAME == "inverse_root":
        value = inverse_root(value)
    elif NAME == "sigmoid":
        value = sigmoid(value)
    elif NAME == "silu":
        value = silu(value, tl.float32)
    else:
        value = softplus(value)
    tl.store(out + at, value)


def applied(name: str, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _apply[(len(x) // 256,)](x, out, NAME=name, BLOCK=256)
    return out


@pytest.mark.parametrize("name", _EXACT)
def test_within_a_few_ulp(device: torch.device, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.linspace(-85, 85, 4096), torch.randn(4096, generator=generator), torch.linspace(-1e-3, 1e-3, 1024)]
    )
    x = (x.abs() + 1e-6 if name == "inverse_root" else x).to(device)
    exact = _EXACT[name](x.double())
    error = ((applied(name, x).double() - exact).abs() / exact.abs().clamp_min(1e-37)).max()
    assert error < 4 * 2**-23


def test_extremes(device: torch.device) -> None:
    far = torch.tensor([float("-inf"), -1e30, -200.0, 0.0, 200.0, 1e30, float("inf")]).repeat_interleave(256).to(device)

    def ends(name: str) -> list[float]:
        return applied(name, far)[::256].tolist()

    assert ends("exponential") == [0, 0, 0, 1, float("inf"), float("inf"), float("inf")]
    assert ends("sigmoid") == [0, 0, 0, 0.5, 1, 1, 1]
    assert ends("softplus")[:3] == [0, 0, 0]
    assert ends("softplus")[4:] == [200.0, far[5 * 256].item(), float("inf")]
