"""Products of few rows with int4 matrices as whole numbers, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.skinny import Norm, skinny_linear
from kernels.gpu.skinny_configs import SkinnyConfig
from kernels.quantize import quantize_int4
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.lora_support import random_rows
from tests.kernels.gpu.test_skinny import exact

WHOLE = SkinnyConfig("vector", 16, 256, warps=2)
_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""x is rounded to 2^-16 of the largest of its group; bfloat16 results once more (the interpreter truncates)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_product(device: torch.device, dtype: torch.dtype, swiglu: bool, normed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 384, device=device).to(dtype)
    x[1, 128:256] = 0
    weight = quantize_int4(torch.randn(40, 384, device=device) / 16)
    norm = Norm(torch.rand(384, device=device) + 0.5, 1e-6) if normed else None
    residual = torch.randn(3, 20 if swiglu else 40, device=device).to(dtype)
    expected = exact(x, weight, norm, residual, swiglu)
    out = skinny_linear(x, weight, norm=norm, residual=residual, swiglu=swiglu, config=WHOLE)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() / expected.abs().max() < _ERROR[dtype]
    with pytest.raises(ValueError, match="4 rows"):
        skinny_linear(x.repeat(2, 1), weight, config=WHOLE)


def test_largest_values_do_not_overflow(device: torch.device) -> None:
    weight = quantize_int4(torch.ones(8, 256, device=device))
    x = torch.full((1, 256), 3e4, device=device)
    assert torch.allclose(skinny_linear(x, weight, config=WHOLE).double(), exact(x, weight, None, None, False))


def test_adapters(device: torch.device) -> None:
    torch.manual_seed(3)
    slots = [2, 0, 1]
    weight = quantize_int4(torch.randn(96, 256, device=device) / 16)
    x = torch.randn(3, 256, device=device)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    lora = random_rows(slots, [0, 16, 5], (20, 48, 96), 256, device)
    out = skinny_linear(x, weight, norm=norm, swiglu=True, lora=lora, config=WHOLE)
    expected = exact(x, weight, norm, None, True, lora)
    assert (out.double() - expected).abs().max() / expected.abs().max() < _ERROR[torch.float32]
