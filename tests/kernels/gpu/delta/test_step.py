"""The fused decode step of the gated delta rule against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.delta.step import gated_delta_step
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.support import exact_delta, mixer

SHAPES = [(2, 4, 16, 16), (3, 3, 12, 10), (1, 5, 8, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), SHAPES)
def test_step(
    device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    shape = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    m = mixer(3, device, dtype=dtype, **shape)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(5, heads, key_dim, value_dim, device=device)
    before = state.clone()
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    out = gated_delta_step(mixed, m.projected, *m.parameters(), state, slots)
    assert out.dtype == dtype
    limits = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2**-7}
    for row, slot in enumerate(slots.tolist()):
        expected, final = exact_delta(m, mixed[row : row + 1], m.projected[row : row + 1], before[slot])
        torch.testing.assert_close(out[row : row + 1].double(), expected, **limits)
        torch.testing.assert_close(state[slot].double(), final, atol=1e-5, rtol=1e-5)
    assert torch.equal(state[[1, 3]], before[[1, 3]])


def test_bfloat16_states(device: torch.device) -> None:
    m = mixer(2, device, dtype=torch.bfloat16)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(3, 4, 16, 16, device=device).bfloat16()
    before = state.clone()
    out = gated_delta_step(
        mixed, m.projected, *m.parameters(), state, torch.tensor([1, 2], dtype=torch.int32, device=device)
    )
    for row in range(2):
        expected, final = exact_delta(m, mixed[row : row + 1], m.projected[row : row + 1], before[row + 1])
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=1e-3, rtol=2**-7)
        torch.testing.assert_close(state[row + 1].double(), final, atol=1e-3, rtol=2**-7)


def test_extreme_gates(device: torch.device) -> None:
    """Nothing overflows where softplus is linear, the decay vanishes, or β is 0 or 1."""
    m = mixer(4, device)
    m.projected[:, -4:] = torch.tensor([-90.0, -20.0, 30.0, 90.0], device=device)[:, None]
    m.projected[:, -8:-4] = torch.tensor([90.0, -90.0, 0.0, 10.0], device=device)[:, None]
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(5, 4, 16, 16, device=device)
    before = state.clone()
    out = gated_delta_step(
        mixed, m.projected, *m.parameters(), state, torch.arange(1, 5, dtype=torch.int32, device=device)
    )
    for row in range(4):
        expected, final = exact_delta(m, mixed[row : row + 1], m.projected[row : row + 1], before[row + 1])
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(state[row + 1].double(), final, atol=1e-5, rtol=1e-5)


def test_shapes_are_checked(device: torch.device) -> None:
    m = mixer(1, device)
    state = torch.zeros(2, 4, 16, 16, device=device)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="channels"):
        gated_delta_step(m.projected[:, : m.conv_dim - 3], m.projected, *m.parameters(), state, slots)
    with pytest.raises(ValueError, match="wide"):
        gated_delta_step(m.projected[:, : m.conv_dim], m.projected[:, 1:], *m.parameters(), state, slots)
