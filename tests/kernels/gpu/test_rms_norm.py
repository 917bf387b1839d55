"""Fused residual + RMSNorm against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.double()
    return y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Rounding to bfloat16 is within 2**-9; Triton's interpreter truncates, which is within 2**-7."""
    return {"atol": 1e-6, "rtol": 1e-5 if dtype == torch.float32 else 2**-7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (3, 2560), (5, 96), (64, 256), (2, 33)])
def test_norm(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    weight = 1 + 0.1 * torch.randn(shape[1], device=device)
    before = x.clone()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact_norm(x, weight, 1e-6), **tolerance(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_updated_in_place(device: torch.device, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(7, 192, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(192, device=device)
    total = (x.float() + delta.float()).to(dtype)
    out = rms_norm(x, weight, 1e-6, delta)
    torch.testing.assert_close(x.double(), total.double(), **tolerance(dtype))
    torch.testing.assert_close(out.double(), exact_norm(x, weight, 1e-6), **tolerance(dtype))


def test_strided_rows_and_a_given_output(device: torch.device) -> None:
    wide = torch.randn(4, 200, device=device)
    out = torch.empty(4, 64, device=device)
    assert rms_norm(wide[:, 8:72], torch.ones(64, device=device), 1e-5, out=out) is out
    torch.testing.assert_close(
        out.double(), exact_norm(wide[:, 8:72], torch.ones(64, device=device), 1e-5), atol=1e-6, rtol=1e-5
    )


def test_zeros_stay_zero_and_no_rows_are_fine(device: torch.device) -> None:
    weight = torch.ones(40, device=device)
    assert not rms_norm(torch.zeros(2, 40, device=device), weight, 1e-6).any()
    assert rms_norm(torch.zeros(0, 40, device=device), weight, 1e-6).shape == (0, 40)


def test_shapes_are_checked(device: torch.device) -> None:
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(2, 40, device=device), torch.ones(41, device=device), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(40, 2, device=device).t(), torch.ones(40, device=device), 1e-6)
