"""Causal convolution: decodes, packed segments, states, every split."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.delta.conv1d import conv_decode, conv_prefill
from kernels.gpu.segments import Segments
from tests.kernels.gpu.delta.support import CHAIN_SLOTS, CHAINS, Chain, chain_segments, exact_conv

DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Rounding to bfloat16 is within 2**-9; Triton's interpreter truncates, which is within 2**-7."""
    return {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-4, "rtol": 2**-7}


def case(rows: int, channels: int, kernel: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, channels + 24), (kernel, channels), (9, kernel - 1, channels)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "kernel", "row_block"), [(64, 4, 1), (200, 3, 4), (36, 2, 2)])
def test_decode(device: torch.device, channels: int, kernel: int, row_block: int, dtype: torch.dtype) -> None:
    x, weight, state = case(5, channels, kernel, dtype, device)
    slots = torch.tensor([3, 0, 8, 0, 1], dtype=torch.int32, device=device)
    before = state.clone()
    out = conv_decode(x, weight, state, slots, block=128, row_block=row_block)
    assert out.dtype == dtype
    for row in (0, 2, 4):
        slot = int(slots[row])
        expected, final = exact_conv(x[row : row + 1, :channels], weight, before[slot])
        torch.testing.assert_close(out[row : row + 1].double(), expected, **tolerance(dtype))
        assert torch.equal(state[slot], final)
    untouched = [2, 4, 5, 6, 7]
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "kernel", "rows"), [(64, 4, 16), (200, 3, 64), (36, 2, 8)])
def test_prefill(device: torch.device, channels: int, kernel: int, rows: int, dtype: torch.dtype) -> None:
    lengths, starts, slots = [1, 2, 70, 64, 3, 33], [7, 0, 0, 5, 1, 2], [4, 1, 7, 2, 3, 8]
    decodes = 2
    x, weight, state = case(decodes + sum(lengths), channels, kernel, dtype, device)
    state[[1, 7]] = float("nan")  # what a sequence that starts now finds
    before = state.clone()
    segments = Segments.build(lengths, starts, slots, [0] * 6, device, first_row=decodes, max_segments=8, max_tiles=11)
    out = conv_prefill(x, weight, state, segments, rows=rows, block=128)
    begin = decodes
    for length, start, slot in zip(lengths, starts, slots, strict=True):
        past = before[slot] if start else torch.zeros_like(before[slot])
        expected, final = exact_conv(x[begin : begin + length, :channels], weight, past)
        torch.testing.assert_close(out[begin : begin + length].double(), expected, **tolerance(dtype))
        assert torch.equal(state[slot], final)
        begin += length
    assert torch.equal(state[[0, 5, 6]], before[[0, 5, 6]])


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("chains", CHAINS)
def test_chains(device: torch.device, chains: list[Chain], rows: int) -> None:
    """Every link's state, and the rows as those of one segment; the slot that is written last is the one whose past the
    first rows need."""
    channels, begin = 40, 3
    total = begin + sum(sum(chain.lengths) for chain in chains)
    x, weight, state = case(total, channels, 4, torch.float32, device)
    assert len(state) == CHAIN_SLOTS
    for chain in chains:
        if chain.start == 0:
            state[chain.slot] = float("nan")
    before = state.clone()
    out = conv_prefill(x, weight, state, chain_segments(chains, device, first_row=begin), rows=rows, block=32)
    for chain in chains:
        past = before[chain.slot] if chain.start else torch.zeros_like(before[chain.slot])
        for length, target in zip(chain.lengths, chain.targets, strict=True):
            expected, past = exact_conv(x[begin : begin + length, :channels], weight, past)
            torch.testing.assert_close(out[begin : begin + length].double(), expected, **tolerance(torch.float32))
            assert torch.equal(state[target], past)
            begin += length
    rest = sorted(set(range(CHAIN_SLOTS)) - {target for chain in chains for target in chain.targets})
    assert torch.equal(state[rest].nan_to_num(7), before[rest].nan_to_num(7))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 31, 64, 65])
def test_every_split_is_the_same(device: torch.device, cut: int) -> None:
    x, weight, state = case(66, 40, 4, torch.float32, device)
    split_state = state.clone()
    whole = conv_prefill(x, weight, state, Segments.build([66], [0], [1], [0], device))
    first = conv_prefill(x, weight, split_state, Segments.build([cut], [0], [1], [0], device))
    second = conv_prefill(
        x, weight, split_state, Segments.build([66 - cut], [cut], [1], [0], device, first_row=cut), out=first
    )
    assert torch.equal(second, whole)
    assert torch.equal(state[1], split_state[1])
    step = conv_decode(x[65:], weight, split_state, torch.tensor([1], dtype=torch.int32, device=device))
    assert step.shape == (1, 40)


@pytest.mark.parametrize("rows", [33, 64, 97])
def test_many_decodes_are_computed_as_few_are(device: torch.device, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(4, 40, generator=generator).to(device, torch.bfloat16)
    x = torch.randn(rows, 48, generator=generator).to(device, torch.bfloat16)
    state = torch.randn(rows + 1, 3, 40, generator=generator).to(device, torch.bfloat16)
    slots = (1 + torch.randperm(rows, generator=generator)).to(device, torch.int32)
    alone = state.clone()
    expected = torch.cat([conv_decode(x[r : r + 1], weight, alone, slots[r : r + 1]) for r in range(rows)])
    assert torch.equal(conv_decode(x, weight, state, slots), expected)
    assert torch.equal(state, alone)


def test_shapes_are_checked(device: torch.device) -> None:
    x, weight, state = case(2, 40, 4, torch.float32, device)
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="state must be"):
        conv_decode(x, weight, state[:, :2], slots)
    with pytest.raises(ValueError, match="contiguous"):
        conv_decode(x, weight, state.transpose(1, 2).contiguous().transpose(1, 2), slots)
