"""SwiGLU against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.activations import swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 512), (3, 9216), (5, 24), (0, 24)])
def test_swiglu(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    gate_up = torch.randn(rows, 2 * width, device=device).mul(4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = swiglu(gate_up)
    assert out.dtype == dtype
    # Rounding to bfloat16 is within 2**-9; Triton's interpreter truncates, which is within 2**-7.
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=rtol)


def test_float32_is_as_exact_as_float32_is(device: torch.device) -> None:
    """The hardware's exponential and quotient alone are 1e-6 off here."""
    gate = torch.linspace(-8, 8, 20_001, device=device)
    out = swiglu(torch.cat((gate, torch.ones_like(gate)))[None])[0].double()
    torch.testing.assert_close(out, gate.double() / (1 + (-gate.double()).exp()), atol=0, rtol=5e-7)


def test_large_gates_stay_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 3.0]], device=device)
    assert swiglu(gate_up).tolist() == [[0.0, 600.0]]


def test_an_odd_width_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="gate"):
        swiglu(torch.zeros(2, 5, device=device))
