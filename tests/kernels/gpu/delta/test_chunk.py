"""The chunked gated delta rule against the recurrence in float64, token by token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.chunk_configs import EXACT, FEW, MANY, ChunkConfig, chunk_config
from kernels.gpu.delta.conv1d import conv_prefill
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.launch.device import named
from kernels.gpu.segments import Segments
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.checks import FLOAT32, check, check_chains
from tests.kernels.gpu.delta.support import CHAINS, Chain, chain_segments, exact_delta, mixer

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.sampled
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", [0, 9])
def test_lengths(device: torch.device, length: int, start: int) -> None:
    check(mixer(length, device, heads=2), [length], [start], device, FLOAT32)


@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(3, 3, 12, 10), (1, 3, 8, 40)])
def test_packed_segments_of_odd_shapes(
    device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> None:
    lengths = [5, 70, 1, 64, 33]
    m = mixer(3 + sum(lengths), device, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim)
    config = dataclasses.replace(EXACT, block_v=16)
    check(m, lengths, [0, 4, 9, 0, 1], device, FLOAT32, first_row=3, config=config)


@pytest.mark.sampled
@pytest.mark.parametrize("block_v", [16, 32])
@pytest.mark.parametrize("chains", CHAINS)
def test_chains(device: torch.device, chains: list[Chain], block_v: int) -> None:
    rows = 3 + sum(sum(chain.lengths) for chain in chains)
    m = mixer(rows, device, key_heads=1, heads=2, value_dim=24)
    check_chains(m, chains, device, FLOAT32, dataclasses.replace(EXACT, block_v=block_v))


def test_links_do_not_make_a_sequence_many(device: torch.device) -> None:
    """How the work is cut goes by the sequences: with two programs a multiprocessor one alone would take longer."""
    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    chain = chain_segments([Chain(0, 2, (64, 64), (6, 2))], device)
    assert chunk_config(shape, dataclasses.replace(chain, chains=1), torch.bfloat16, named("sm90")) is FEW
    assert chunk_config(shape, chain, torch.bfloat16, named("sm90")) is MANY


@pytest.mark.parametrize("alike", [0.9, 0.999, 1.0])
def test_keys_strongly_alike(device: torch.device, alike: float) -> None:
    """The triangular system is then as ill-conditioned as it gets; powers of its matrix would overflow."""
    check(mixer(130, device, heads=2, alike=alike), [130], [3], device, {"atol": 3e-4, "rtol": 1e-4})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", [1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_every_split_is_the_same(device: torch.device, cut: int) -> None:
    total = 129
    m = mixer(total, device, key_heads=1, heads=2)
    mixed = m.projected[:, : m.conv_dim].clone()
    expected, final = exact_delta(m, mixed, m.projected, torch.zeros(2, 16, 16, device=device))
    state = torch.full((2, 2, 16, 16), float("nan"), device=device)
    out = torch.empty(total, 32, device=device)
    for begin, end in ((0, cut), (cut, total - 1)):
        if begin < end:
            segments = Segments.build([end - begin], [begin], [1], [0], device, first_row=begin)
            gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, out=out)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    gated_delta_step(mixed[-1:], m.projected[-1:], *m.parameters(), state, slots, out=out[-1:])
    torch.testing.assert_close(out.double(), expected, **FLOAT32)
    torch.testing.assert_close(state[1].double(), final, **FLOAT32)


@pytest.mark.sampled
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("block_v", [16, 32])
def test_bfloat16(device: torch.device, block_v: int, terms: int) -> None:
    """Within a few roundings of bfloat16 in one term; the output's own rounding is most of the error in two."""
    config = ChunkConfig(block_v=block_v, num_warps=4, num_stages=2, state_terms=terms, tile_terms=terms)
    m = mixer(140, device, heads=2, value_dim=32, dtype=torch.bfloat16)
    limits = {"atol": 0.1 if terms == 1 else 0.03, "rtol": 2**-6}
    check(m, [33, 107], [0, 2], device, limits, config=config)


def test_bfloat16_states(device: torch.device) -> None:
    m = mixer(66, device, heads=2, dtype=torch.bfloat16)
    config = dataclasses.replace(MANY, state_terms=2, tile_terms=2)
    check(m, [66], [2], device, {"atol": 0.05, "rtol": 2**-6}, config=config, state_dtype=torch.bfloat16)


def test_a_decay_that_forgets_everything(device: torch.device) -> None:
    m = mixer(70, device, heads=2)
    m.projected[::7, -2:] = 60.0
    check(m, [70], [1], device, FLOAT32)


def test_terms_are_checked() -> None:
    with pytest.raises(ValueError, match="1 or 2"):
        ChunkConfig(block_v=32, num_warps=4, num_stages=1, state_terms=3)


@pytest.mark.cuda
@pytest.mark.parametrize("alike", [0.0, 0.97])
@pytest.mark.parametrize("config", [FEW, MANY, dataclasses.replace(FEW, state_terms=2, tile_terms=2)])
def test_the_real_shape(device: torch.device, config: ChunkConfig, alike: float) -> None:
    lengths = [1, 64, 129, 200]
    m = mixer(
        sum(lengths), device, key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16, alike=alike
    )
    check(m, lengths, [0, 7, 0, 3], device, {"atol": 0.15, "rtol": 2**-5}, config=config)


@pytest.mark.cuda
@pytest.mark.parametrize("config", [FEW, MANY, dataclasses.replace(FEW, state_terms=2, tile_terms=2)])
@pytest.mark.parametrize("chains", CHAINS)
def test_chains_of_the_real_shape(device: torch.device, chains: list[Chain], config: ChunkConfig) -> None:
    rows = 3 + sum(sum(chain.lengths) for chain in chains)
    m = mixer(rows, device, key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    check_chains(m, chains, device, {"atol": 0.15, "rtol": 2**-5}, config)


@pytest.mark.cuda
def test_overlapping_launches_change_nothing(device: torch.device) -> None:
    m = mixer(300, device, key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    segments = Segments.build([100, 200], [0, 0], [1, 2], [0, 0], device)
    results = []
    for pdl in (False, True):
        conv = torch.zeros(3, 3, m.conv_dim, dtype=torch.bfloat16, device=device)
        state = torch.zeros(3, 32, 128, 128, device=device)
        for _ in range(10):
            mixed = conv_prefill(m.projected, m.conv, conv, segments, pdl=pdl)
            out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, pdl=pdl)
        results.append((out, state))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
