"""int4: quantization, and its decoding on the GPU against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear.int4 import dequantize
from kernels.quantize import dequantize_int4, quantize_int4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 256), (65, 128)])
def test_decoding_equals_the_reference(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = quantize_int4(torch.randn(shape, device=device).to(dtype))
    out = dequantize(weight, dtype, block_n=16)
    expected = dequantize_int4(weight, dtype)
    # The interpreter truncates to bfloat16 where the GPU rounds.
    torch.testing.assert_close(out, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


def test_the_error_is_within_half_a_step_of_an_unclipped_range() -> None:
    weight = torch.randn(30, 256)
    decoded = dequantize_int4(quantize_int4(weight), torch.float32)
    groups = (decoded - weight).view(30, 2, 128).norm(dim=-1)
    span = weight.view(30, 2, 128)
    step = (span.amax(-1).clamp_min(0) - span.amin(-1).clamp_max(0)) / 15
    # Rounding alone makes at most half a step (the scale's own rounding a little more); clipping only lowers the norm.
    assert (groups <= 0.52 * step * 128**0.5).all()
    assert (decoded - weight).norm() / weight.norm() < 0.11


def test_exact_where_it_can_be() -> None:
    # Every group holds all 16 levels: its range, zero point and steps are then exact.
    levels = torch.arange(128).remainder(16).sub(5).float().repeat(4, 1)
    assert torch.equal(dequantize_int4(quantize_int4(levels), torch.float32), levels)
    assert not dequantize_int4(quantize_int4(torch.zeros(2, 128)), torch.float32).any()


def test_groups_must_divide_the_inputs(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple"):
        quantize_int4(torch.zeros(2, 100, device=device))
    with pytest.raises(ValueError, match="out must"):
        dequantize(quantize_int4(torch.zeros(2, 128, device=device)), torch.float32, out=torch.zeros(3, 128))
