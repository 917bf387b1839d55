"""float8 products of many rows against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear.fp8 import Fp8Config, fp8_linear, quantize_rows
from kernels.quantize import dequantize_fp8, pair, quantize_fp8, unpair
from tests.kernels.gpu import interpreter  # noqa: F401

SMALL = Fp8Config(block_m=64, block_n=64, block_k=128, warps=4, stages=2, row_tiles=2, promote=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_scaled_rounded_and_paired(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(5, 384, device=device).mul(torch.logspace(-3, 3, 5, device=device)[:, None]).to(dtype)
    values, scale = quantize_rows(x)
    torch.testing.assert_close(scale, x.float().abs().amax(1) / 448, rtol=1e-5, atol=0)
    decoded = unpair(values.float()) * scale[:, None]
    # Three bits of mantissa: within 2^-4 of a normal number or of the least step (the interpreter truncates there).
    error = (decoded - x.float()).abs()
    assert (error <= x.float().abs() * 1.01 * 2**-4 + scale[:, None] * 2**-9).all()


@pytest.mark.parametrize("rows", [1, 70, 200])
def test_product(device: torch.device, rows: int) -> None:
    x = torch.randn(rows, 256, device=device)
    weight = quantize_fp8(torch.randn(80, 256, device=device) / 16)
    residual = torch.randn(rows, 80, device=device)
    values, scale = quantize_rows(x)
    decoded = (unpair(values.float()) * scale[:, None]).double()
    expected = decoded @ dequantize_fp8(weight, torch.float32).double().t()
    out = fp8_linear(values, scale, weight, out_dtype=torch.float32, config=SMALL)
    # float8 tensor cores keep about 14 bits of a sum.
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    added = fp8_linear(values, scale, weight, residual=residual, out=residual, config=SMALL)
    assert added is residual
    assert (added - out).abs().max() > 0.5


@pytest.mark.parametrize("inputs", [256, 2560])
def test_product_as_it_is_cut(device: torch.device, inputs: int) -> None:
    """Sums stay in the tensor cores, which keep about 14 bits of them: beside factors of 4 bits that is little."""
    x = torch.randn(300, inputs, device=device).bfloat16()
    weight = quantize_fp8(torch.randn(272, inputs, device=device) / inputs**0.5)
    values, scale = quantize_rows(x)
    decoded = (unpair(values.float()) * scale[:, None]).double()
    exact = dequantize_fp8(weight, torch.float32).double().t()
    out = fp8_linear(values, scale, weight).double()
    rounded = (decoded @ exact - x.double() @ exact).norm()
    assert (out - decoded @ exact).norm() < 0.25 * rounded


def test_pairs_are_undone() -> None:
    x = torch.arange(512.0).view(2, 256)
    assert pair(x)[0, :4].tolist() == [0, 64, 1, 65]
    assert torch.equal(unpair(pair(x)), x)


def test_shapes_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        quantize_rows(torch.zeros(2, 100, device=device))
    with pytest.raises(ValueError, match="multiple of 128"):
        quantize_fp8(torch.zeros(2, 100, device=device))
    weight = quantize_fp8(torch.zeros(16, 128, device=device))
    with pytest.raises(ValueError, match="fit"):
        fp8_linear(*quantize_rows(torch.zeros(2, 256, device=device)), weight)
