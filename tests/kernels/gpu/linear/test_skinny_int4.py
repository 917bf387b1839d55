"""Products of up to 8 rows with int4 matrices that are multiplied as they are, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear.skinny import Norm, skinny_linear
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from kernels.quantize import quantize_int4
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.linear.test_skinny import exact
from tests.kernels.gpu.lora.support import random_rows

WHOLE = SkinnyConfig("vector", 16, 256, warps=2)
_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""bfloat16 results are rounded (the interpreter truncates them)."""
_TRUNCATED = 3e-4
"""bfloat16 products in float32: what is added to the 4-bit numbers, and taken away from sums, is some 100 times what
remains, and tensor cores truncate."""


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_product(device: torch.device, rows: int, dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 384, device=device).to(dtype)
    x[0, 128:256] = 0
    weight = quantize_int4(torch.randn(40, 384, device=device) / 16)
    norm = Norm(torch.rand(384, device=device) + 0.5, 1e-6) if normed else None
    for swiglu in (False, True):
        residual = torch.randn(rows, 20 if swiglu else 40, device=device).to(dtype)
        expected = exact(x, weight, norm, residual, swiglu)
        out = skinny_linear(x, weight, norm=norm, residual=residual, swiglu=swiglu, config=WHOLE)
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() / expected.abs().max() < _ERROR[dtype]


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("block_n", "warps"), [(16, 1), (16, 2), (32, 2), (16, 8)])
def test_groups_in_turns(device: torch.device, rows: int, block_n: int, warps: int) -> None:
    """More turns than columns, fewer, and warps without a group; rows of the weight that no tile fills."""
    torch.manual_seed(1)
    x = torch.randn(rows, 1152, device=device, dtype=torch.bfloat16)
    weight = quantize_int4(torch.randn(37, 1152, device=device) / 16)
    config = SkinnyConfig("vector", block_n, 128 * warps, warps=warps)
    out = skinny_linear(x, weight, config=config, out_dtype=torch.float32)
    expected = exact(x, weight, None, None, False)
    assert (out.double() - expected).abs().max() / expected.abs().max() < _TRUNCATED


def test_limits(device: torch.device) -> None:
    weight = quantize_int4(torch.ones(8, 256, device=device))
    x = torch.full((1, 256), 3e4, device=device)
    out = skinny_linear(x, weight, config=WHOLE)
    assert torch.allclose(out.double(), exact(x, weight, None, None, False))
    with pytest.raises(ValueError, match="8 rows"):
        skinny_linear(x.repeat(9, 1), weight, config=WHOLE)


@pytest.mark.parametrize("slots", [[2], [2, 0, 1]])
def test_adapters(device: torch.device, slots: list[int]) -> None:
    torch.manual_seed(3)
    weight = quantize_int4(torch.randn(96, 256, device=device) / 16)
    x = torch.randn(len(slots), 256, device=device)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    lora = random_rows(slots, [0, 16, 5], (20, 48, 96), 256, device)
    out = skinny_linear(x, weight, norm=norm, swiglu=True, lora=lora, config=WHOLE)
    expected = exact(x, weight, norm, None, True, lora)
    assert (out.double() - expected).abs().max() / expected.abs().max() < _ERROR[torch.float32]
