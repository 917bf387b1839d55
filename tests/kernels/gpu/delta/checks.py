"""A prefill by the chunked gated delta rule against float64, token by token."""

from __future__ import annotations

import torch

from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.chunk_configs import ChunkConfig
from kernels.gpu.segments import TILE, Segments
from tests.kernels.gpu.delta.support import CHAIN_SLOTS, Chain, Mixer, chain_segments, exact_delta

FLOAT32 = {"atol": 5e-5, "rtol": 1e-5}


def check(
    m: Mixer,
    lengths: list[int],
    starts: list[int],
    device: torch.device,
    limits: dict[str, float],
    *,
    first_row: int = 0,
    config: ChunkConfig | None = None,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """All segments in one call, each against float64; other slots untouched."""
    count = len(lengths)
    mixed = m.projected[:, : m.conv_dim].clone()
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(count + 3, m.heads, m.key_dim, m.value_dim, generator=generator).to(device, state_dtype)
    slots = [count + 1 - index for index in range(count)]
    for slot, start in zip(slots, starts, strict=True):
        if start == 0:
            state[slot] = float("nan")
    before = state.clone()
    room = {"max_segments": count + 1, "max_tiles": sum(-(-length // TILE) for length in lengths) + 3}
    segments = Segments.build(lengths, starts, slots, [0] * count, device, first_row=first_row, **room)
    out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, config=config)
    begin = first_row
    for length, start, slot in zip(lengths, starts, slots, strict=True):
        rows = slice(begin, begin + length)
        past = before[slot] if start else torch.zeros_like(before[slot])
        expected, final = exact_delta(m, mixed[rows], m.projected[rows], past)
        torch.testing.assert_close(out[rows].double(), expected, **limits)
        torch.testing.assert_close(state[slot].double(), final, **limits)
        begin += length
    assert torch.equal(state[[0, 1, count + 2]], before[[0, 1, count + 2]])


def check_chains(
    m: Mixer, chains: list[Chain], device: torch.device, limits: dict[str, float], config: ChunkConfig | None = None
) -> None:
    """The rows and the state behind each link against float64; other slots untouched."""
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(CHAIN_SLOTS, m.heads, m.key_dim, m.value_dim, generator=generator).to(device)
    for chain in chains:
        if chain.start == 0:
            state[chain.slot] = float("nan")
    before, begin = state.clone(), 3
    mixed = m.projected[:, : m.conv_dim].clone()
    segments = chain_segments(chains, device, first_row=begin)
    out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, config=config)
    for chain in chains:
        past = before[chain.slot] if chain.start else torch.zeros_like(before[chain.slot])
        for length, target in zip(chain.lengths, chain.targets, strict=True):
            rows = slice(begin, begin + length)
            expected, past = exact_delta(m, mixed[rows], m.projected[rows], past)
            torch.testing.assert_close(out[rows].double(), expected, **limits)
            torch.testing.assert_close(state[target].double(), past, **limits)
            begin += length
    rest = sorted(set(range(CHAIN_SLOTS)) - {target for chain in chains for target in chain.targets})
    assert torch.equal(state[rest].nan_to_num(7), before[rest].nan_to_num(7))
