"""Short segments token by token: against float64, against the decode step bit by bit, and into other slots."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.conv1d import conv_prefill
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.verify import gated_delta_verify
from kernels.gpu.segments import Segments
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.support import exact_delta, mixer

LENGTHS, STARTS, SLOTS, OUT_SLOTS = [2, 1, 4, 3], [5, 9, 2, 0], [3, 5, 1, 6], [4, 5, 2, 7]


def segments(device: torch.device) -> Segments:
    return Segments.build(
        LENGTHS, STARTS, SLOTS, [0] * 4, device, first_row=1, max_segments=6, max_tiles=5, out_slots=OUT_SLOTS
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(2, 4, 16, 16), (3, 3, 12, 10)])
@pytest.mark.parametrize("kernel", [gated_delta_verify, gated_delta_prefill])
def test_states_go_to_other_slots(device: torch.device, dtype: torch.dtype, dims: tuple[int, ...], kernel) -> None:
    m = mixer(12, device, dtype=dtype, **dict(zip(("key_heads", "heads", "key_dim", "value_dim"), dims, strict=True)))
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(9, *dims[1:], generator=torch.Generator().manual_seed(1)).to(device)
    state[SLOTS[-1]] = float("nan")
    before = state.clone()
    out = kernel(mixed, m.projected, *m.parameters(), state, segments(device))
    limits = {"atol": 5e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 2**-5}
    begin = 1
    for length, start, slot, target in zip(LENGTHS, STARTS, SLOTS, OUT_SLOTS, strict=True):
        rows = slice(begin, begin + length)
        past = before[slot] if start else torch.zeros_like(before[slot])
        expected, final = exact_delta(m, mixed[rows], m.projected[rows], past)
        torch.testing.assert_close(out[rows].double(), expected, **limits)
        torch.testing.assert_close(state[target].double(), final, **limits)
        if slot != target:
            torch.testing.assert_close(state[slot], before[slot], rtol=0, atol=0, equal_nan=True)
        begin += length
    assert torch.equal(state[[0, 8]], before[[0, 8]])


def test_as_the_decode_step(device: torch.device) -> None:
    """The same arithmetic: a draft token that is right changes no bit of the state."""
    m = mixer(3, device)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(3, 4, 16, 16, device=device)
    one = state.clone()
    short = Segments.build([3], [4], [1], [0], device, out_slots=[2])
    out = gated_delta_verify(mixed, m.projected, *m.parameters(), state, short)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    for row in range(3):
        here = (mixed[row : row + 1], m.projected[row : row + 1], *m.parameters(), one, slots)
        assert torch.equal(gated_delta_step(*here), out[row : row + 1])
    assert torch.equal(one[1], state[2])


def test_the_convolution_too(device: torch.device) -> None:
    m = mixer(12, device)
    conv = torch.randn(9, 3, m.conv_dim, device=device)
    before, inplace = conv.clone(), conv.clone()
    out = conv_prefill(m.projected, m.conv, conv, segments(device))
    alike = Segments.build(LENGTHS, STARTS, SLOTS, [0] * 4, device, first_row=1)
    expected = conv_prefill(m.projected, m.conv, inplace, alike)
    assert torch.equal(out[1:11], expected[1:11])
    for slot, target in zip(SLOTS, OUT_SLOTS, strict=True):
        assert torch.equal(conv[target], inplace[slot])
        assert slot == target or torch.equal(conv[slot], before[slot])
