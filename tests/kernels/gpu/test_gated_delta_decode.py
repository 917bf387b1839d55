"""The whole decode step in one kernel: the same as convolution and step one after the other."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.conv1d import conv_decode
from kernels.gpu.gated_delta_decode import gated_delta_decode
from kernels.gpu.gated_delta_step import StepConfig, gated_delta_step
from tests.kernels.gpu.delta_support import mixer


@pytest.mark.parametrize("block_v", [8, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "kernel"), [(2, 4, 16, 16, 4), (3, 3, 12, 10, 3), (1, 5, 8, 24, 2)]
)
def test_it_equals_two_kernels(
    device: torch.device,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    dtype: torch.dtype,
    block_v: int,
) -> None:
    shape = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "kernel": kernel}
    m = mixer(3, device, dtype=dtype, **shape)
    generator = torch.Generator().manual_seed(3)
    conv = torch.randn(5, kernel - 1, m.conv_dim, generator=generator).to(device, dtype)
    state = torch.randn(5, heads, key_dim, value_dim, generator=generator).to(device)
    slots = torch.tensor([4, 1, 2], dtype=torch.int32, device=device)
    readers = torch.zeros(4, key_heads, dtype=torch.int32, device=device)
    config = StepConfig(block_v=block_v, num_warps=4, num_stages=3)
    other_conv, other_state = conv.clone(), state.clone()
    for _ in range(2):
        mixed = conv_decode(m.projected, m.conv, other_conv, slots)
        expected = gated_delta_step(mixed, m.projected, *m.parameters(), other_state, slots, config=config)
        out = gated_delta_decode(m.projected, m.conv, conv, readers, *m.parameters(), state, slots, config=config)
        limits = {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2**-6}
        torch.testing.assert_close(out, expected, **limits)
        torch.testing.assert_close(state, other_state, **limits)
        assert torch.equal(conv, other_conv)
        assert not readers.any()


def test_shapes_are_checked(device: torch.device) -> None:
    m = mixer(1, device)
    state = torch.zeros(2, 4, 16, 16, device=device)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    conv = torch.zeros(2, 3, m.conv_dim, device=device)
    readers = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="conv_state"):
        gated_delta_decode(m.projected, m.conv, conv[:, 1:], readers, *m.parameters(), state, slots)
    with pytest.raises(ValueError, match="readers"):
        gated_delta_decode(m.projected, m.conv, conv, readers[:, 1:], *m.parameters(), state, slots)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("pdl", [False, True])
def test_many_rows_of_the_real_shape(device: torch.device, rows: int, pdl: bool) -> None:
    """Step after step, as the last reader of a convolution state changes from launch to launch."""
    m = mixer(rows, device, key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    conv = torch.randn(rows + 1, 3, m.conv_dim, device=device).bfloat16()
    state = torch.randn(rows + 1, 32, 128, 128, device=device)
    slots = torch.randperm(rows, device=device).add(1).int()
    readers = torch.zeros(rows, 16, dtype=torch.int32, device=device)
    other_conv, other_state = conv.clone(), state.clone()
    for _ in range(20):
        mixed = conv_decode(m.projected, m.conv, other_conv, slots)
        expected = gated_delta_step(mixed, m.projected, *m.parameters(), other_state, slots)
        out = gated_delta_decode(m.projected, m.conv, conv, readers, *m.parameters(), state, slots, pdl=pdl)
        assert torch.equal(conv, other_conv)
        torch.testing.assert_close(out, expected, atol=0.02, rtol=2**-6)
    torch.testing.assert_close(state, other_state, atol=2e-3, rtol=1e-3)
    assert not readers.any()
