"""Long chains in pieces side by side against the recurrence in float64, token by token, as close as in one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu.delta.chunk import gated_delta_prefill, scan_tiles
from kernels.gpu.delta.chunk_configs import (
    EXACT,
    FEW,
    MANY,
    TIMES,
    ChunkConfig,
    PieceConfig,
    PieceTimes,
    chunk_config,
    many,
    pieces_of,
)
from kernels.gpu.delta.pieces import Joined, join_pieces
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import prepare_tiles
from kernels.gpu.launch.device import DeviceLimits, architectures, named
from kernels.gpu.segments import TILE, Segments
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.checks import FLOAT32, check, check_chains
from tests.kernels.gpu.delta.support import CHAINS, EPS, Chain, Mixer, chain_segments, exact_delta, mixer

LONG = ([Chain(5, 2, (64, 70, 1, 130), (5, 6, 7, 2)), Chain(0, 1, (9,), (1,)), Chain(70, 3, (140,), (4,))],)
"""A prompt with snapshots inside its pieces, a short one that is not cut, and one that leaves its slot alone."""


def cut(tiles: int, config: ChunkConfig = EXACT, *, block_v: int = 16) -> ChunkConfig:
    return replace(config, pieces=PieceConfig(tiles, block_v, num_warps=4, num_stages=config.num_stages))


@pytest.mark.sampled
@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("chains", [*CHAINS, *LONG])
def test_chains(device: torch.device, chains: list[Chain], tiles: int) -> None:
    """Also those with fewer tiles than pieces would need."""
    rows = 3 + sum(sum(chain.lengths) for chain in chains)
    m = mixer(rows, device, key_heads=1, heads=2, value_dim=24, slow=6)
    check_chains(m, chains, device, FLOAT32, cut(tiles))


@pytest.mark.parametrize(("key_heads", "heads", "key_dim", "value_dim"), [(3, 3, 12, 10), (1, 2, 40, 8)])
def test_odd_shapes(device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int) -> None:
    lengths = [70, 1, 193]
    sizes = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    m = mixer(3 + sum(lengths), device, **sizes, slow=6)
    check(m, lengths, [4, 9, 0], device, FLOAT32, first_row=3, config=cut(1))


def test_a_long_chain_of_many_pieces(device: torch.device) -> None:
    m = mixer(1350, device, key_heads=1, heads=1, slow=6)
    check(m, [1350], [7], device, FLOAT32, config=cut(2))


@pytest.mark.parametrize(
    ("a", "b", "every"), [(-60.0, 0.0, 1), (-60.0, 60.0, 1), (-60.0, -60.0, 1), (10.0, 0.0, 64), (6.0, 6.0, 1)]
)
def test_extremes_of_decay_and_write_strength(device: torch.device, a: float, b: float, every: int) -> None:
    """``a``: nothing is forgotten, or much, in some rows or all; ``b``: all is overwritten, or nothing is written."""
    m = mixer(330, device, heads=2, slow=6)
    m.projected[::every, -2:] = a
    m.projected[:, -4:-2] += b
    check(m, [330], [3], device, FLOAT32, config=cut(1))


def test_a_decay_that_forgets_everything(device: torch.device) -> None:
    """Such decays cost float32 digits in one piece already: as close to that as it is to float64 elsewhere."""
    m = mixer(330, device, heads=2, slow=6)
    m.projected[::97, -2:] = 60.0
    mixed, results = m.projected[:, : m.conv_dim].clone(), []
    for config in (EXACT, cut(1)):
        state = torch.ones(2, 2, 16, 16, device=device)
        segments = Segments.build([330], [5], [1], [0], device)
        results.append(
            (gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, config=config), state)
        )
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **FLOAT32)


@pytest.mark.parametrize("alike", [0.9, 1.0])
def test_keys_strongly_alike(device: torch.device, alike: float) -> None:
    limits = {"atol": 3e-4, "rtol": 1e-4}
    check(mixer(258, device, heads=2, alike=alike, slow=6), [258], [3], device, limits, config=cut(1))


@pytest.mark.parametrize("terms", [1, 2])
def test_bfloat16(device: torch.device, terms: int) -> None:
    config = ChunkConfig(block_v=16, num_warps=4, num_stages=2, state_terms=terms, tile_terms=terms)
    m = mixer(290, device, heads=2, value_dim=32, dtype=torch.bfloat16, slow=6)
    limits = {"atol": 0.1 if terms == 1 else 0.03, "rtol": 2**-6}
    check(m, [33, 257], [0, 2], device, limits, config=cut(1, config))


def test_bfloat16_states(device: torch.device) -> None:
    m = mixer(258, device, heads=2, dtype=torch.bfloat16, slow=6)
    config = cut(1, replace(MANY, state_terms=2, tile_terms=2))
    check(m, [258], [2], device, {"atol": 0.05, "rtol": 2**-6}, config=config, state_dtype=torch.bfloat16)


def passes(m: Mixer, device: torch.device, config: ChunkConfig) -> Joined:
    """What the passes before the scan leave for the scan of one prompt, which then is right though its slot has other
    contents: on a GPU the last piece of a prompt may be done before the first one begins."""
    length = len(m.projected)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(3, m.heads, m.key_dim, m.value_dim, generator=torch.Generator().manual_seed(5)).to(device)
    shape, segments = DeltaShape.of(mixed, m.projected, state), Segments.build([length], [7], [1], [0], device)
    exact = {"terms": 1, "inverse_terms": 2, "num_warps": 4}
    tiles = prepare_tiles(mixed, m.projected, m.negative_a, m.dt_bias, shape, segments, **exact)
    joined = join_pieces(mixed, m.projected, state, shape, segments, tiles, config)
    assert joined is not None
    expected, final = exact_delta(m, mixed, m.projected, state[1])
    state[1] = float("nan")
    out = torch.empty(length, shape.value_size, device=device)
    scan_tiles(mixed, m.projected, m.norm, EPS, state, shape, segments, tiles, out, config, joined=joined)
    torch.testing.assert_close(out.double(), expected, **FLOAT32)
    torch.testing.assert_close(state[1].double(), final, **FLOAT32)
    return joined


@pytest.mark.parametrize("a", [-60.0, 60.0])
def test_transitions_shrink_and_never_grow(device: torch.device, a: float) -> None:
    """Of 4 tiles each, with keys all alike; nothing is forgotten, or everything in some rows."""
    m = mixer(16 * TILE, device, key_heads=1, heads=1, alike=0.97)
    m.projected[:: 1 if a < 0 else 100, -1] = a
    transitions = passes(m, device, cut(4)).states[2:, :, :, m.value_dim :]
    assert transitions.isfinite().all()
    assert float(torch.linalg.matrix_norm(transitions.double(), ord=2).max()) < 1 + 1e-4


def test_pieces_read_no_slot_that_another_one_writes(device: torch.device) -> None:
    passes(mixer(330, device, heads=2, slow=6), device, cut(1))


def test_a_prompt_is_cut_the_same_in_any_company(device: torch.device) -> None:
    """To the bit: its pieces depend on its own tiles."""
    m = mixer(500, device, heads=2, slow=6)
    mixed = m.projected[:, : m.conv_dim].clone()
    config, results = cut(2), []
    for lengths in ([300], [300, 200]):
        state = torch.zeros(4, 2, 16, 16, device=device)
        slots = list(range(1, 1 + len(lengths)))
        segments = Segments.build(lengths, [0] * len(lengths), slots, slots, device, max_segments=3, max_tiles=12)
        out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, config=config)
        results.append((out[:300], state[1]))
    for alone, together in zip(*results, strict=True):
        assert torch.equal(alone, together)


def test_short_chains_launch_what_they_did_before(device: torch.device) -> None:
    m = mixer(127, device, heads=2)
    mixed, state = m.projected[:, : m.conv_dim].clone(), torch.zeros(2, 2, 16, 16, device=device)
    shape, segments = DeltaShape.of(mixed, m.projected, state), Segments.build([127], [0], [1], [0], device)
    exact = {"terms": 1, "inverse_terms": 2, "num_warps": 4}
    tiles = prepare_tiles(mixed, m.projected, m.negative_a, m.dt_bias, shape, segments, **exact)
    assert join_pieces(mixed, m.projected, state, shape, segments, tiles, cut(2)) is None
    assert join_pieces(mixed, m.projected, state, shape, segments, tiles, EXACT) is None


def test_a_piece_has_a_tile() -> None:
    with pytest.raises(ValueError, match="1 tile"):
        PieceConfig(0, 64, 4, 3)


SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
HALF = replace(SHAPE, key_heads=8, value_heads=16)
H200 = named("sm90")


def prompts(length: int, count: int = 1) -> Segments:
    return Segments.build([length] * count, [0] * count, list(range(1, count + 1)), [0] * count, "cpu")


def pieces_taken(shape: DeltaShape, segments: Segments, device: DeviceLimits) -> int:
    """Tiles of a piece; 0: one tile of a chain after the other."""
    config = chunk_config(shape, segments, torch.bfloat16, device)
    return config.pieces.tiles if config.pieces else 0


def test_nothing_is_cut_where_nothing_is_measured() -> None:
    for architecture in architectures():
        device = named(architecture)
        for segments in (prompts(3840), prompts(16384), prompts(4096, 2)):
            assert pieces_taken(SHAPE, segments, device) == 0, "128 programs already"
            if device.architecture not in TIMES:
                assert pieces_taken(HALF, segments, device) == 0
    assert chunk_config(SHAPE, prompts(16384), torch.bfloat16, H200) is FEW


def test_half_the_heads_leave_room_for_pieces() -> None:
    """As measured: four take 0.74 of the time of 8,192 tokens and 0.69 of 16,384, and two prompts fill the card."""
    assert [pieces_taken(HALF, prompts(length), H200) for length in (8192, 16384)] == [32, 64]
    assert pieces_taken(HALF, prompts(4096, 2), H200) == 0


def test_states_between_pieces_are_few() -> None:
    """So few bytes that no memory plan counts them: a float32 state and a transition of each piece and head."""
    for heads, count, length in itertools.product((4, 8, 16, 24, 32, 64), range(1, 9), (512, 3840, 8192, 32768)):
        shape = replace(SHAPE, key_heads=heads // 2, value_heads=heads)
        if tiles := pieces_taken(shape, prompts(length, count), H200):
            most = prompts(length, count).max_tiles // tiles
            assert most * heads * shape.key_dim * (shape.key_dim + shape.value_dim) * 4 <= 8 * 2**20


def test_what_is_the_same_in_any_batch_is_never_cut() -> None:
    """The engine takes these with TEMPER_BATCH_INVARIANT."""
    assert EXACT.pieces is None
    assert all(many(named(architecture)).pieces is None for architecture in architectures())


def test_pieces_pay_where_programs_are_few_and_chains_long() -> None:
    times = PieceTimes(few=1.8, many=2.2, ends=1.0, join=1.5, launches=4.0)

    def chosen(shape: DeltaShape, segments: Segments) -> int:
        config = chunk_config(shape, segments, torch.bfloat16, H200, times)
        return config.pieces.tiles if config.pieces else 0

    # 16 heads: 64 programs on 132 multiprocessors. 128 tiles take 230 µs, in two pieces 64 (1.0 + 1.8) and in four
    # 32 (2 · 1.0 + 2.2), as 160 programs of the first pass are two waves. 32 heads: 64 (1.0 + 2.2).
    assert chosen(HALF, prompts(8192)) == 32
    assert chunk_config(HALF, prompts(8192), torch.bfloat16, H200, times) == replace(MANY, pieces=pieces_of(32, H200))
    assert chosen(SHAPE, prompts(8192)) == 64
    # The launches and a short chain; a full card: pieces only add work.
    assert chosen(HALF, prompts(640)) == 0
    assert chosen(SHAPE, prompts(4096, 4)) == 0
    assert chosen(HALF, prompts(64, 8)) == 0


def test_pieces_are_never_chosen_at_a_loss() -> None:
    for ends in (0.4, 1.0, 1.8, 4.0):
        times = PieceTimes(few=1.8, many=2.2, ends=ends, join=1.5, launches=4.0)
        for shape in (SHAPE, HALF):
            for count, length in ((1, 512), (1, 3840), (1, 16384), (2, 4096), (16, 512)):
                config = chunk_config(shape, prompts(length, count), torch.bfloat16, H200, times)
                if config.pieces:
                    tiles = length // TILE
                    costs = times.cut(shape, count, tiles, tiles // config.pieces.tiles, H200)
                    assert costs < times.scan(shape, count, tiles, H200)


REAL: dict[str, Any] = {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
CONFIGS = [FEW, MANY, replace(FEW, state_terms=2, tile_terms=2)]


@pytest.mark.cuda
@pytest.mark.parametrize("config", CONFIGS)
def test_the_real_shape(device: torch.device, config: ChunkConfig) -> None:
    lengths = [1, 700, 129]
    m = mixer(sum(lengths), device, **REAL, slow=6)
    check(m, lengths, [0, 7, 3], device, {"atol": 0.15, "rtol": 2**-5}, config=cut(2, config, block_v=64))


def relative_errors(m: Mixer, device: torch.device, config: ChunkConfig) -> tuple[float, float]:
    """Of one prompt's outputs and final state against float64, in the root mean square."""
    length = len(m.projected)
    mixed = m.projected[:, : m.conv_dim].clone()
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(2, m.heads, m.key_dim, m.value_dim, generator=generator).to(device)
    expected, final = exact_delta(m, mixed, m.projected, state[1])
    segments = Segments.build([length], [7], [1], [0], device)
    out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, config=config)
    pairs = ((out, expected), (state[1], final))
    ours, states = (float((got.double() - exact).norm() / exact.norm()) for got, exact in pairs)
    return ours, states


@pytest.mark.cuda
@pytest.mark.parametrize("alike", [0.5, 0.97])
@pytest.mark.parametrize("config", CONFIGS)
def test_keys_alike_cost_no_more_digits_than_in_one(device: torch.device, config: ChunkConfig, alike: float) -> None:
    """Such keys multiply what one term of bfloat16 leaves out, in one piece as in many."""
    m = mixer(700, device, **REAL, alike=alike, slow=6)
    for pieces, one in zip(
        *(relative_errors(m, device, each) for each in (cut(2, config, block_v=64), config)), strict=True
    ):
        assert pieces < 1.1 * one + 1e-6


@pytest.mark.cuda
@pytest.mark.parametrize("chains", [*CHAINS, *LONG])
def test_chains_of_the_real_shape(device: torch.device, chains: list[Chain]) -> None:
    rows = 3 + sum(sum(chain.lengths) for chain in chains)
    m = mixer(rows, device, **REAL, slow=6)
    check_chains(m, chains, device, {"atol": 0.15, "rtol": 2**-5}, cut(1, FEW, block_v=64))


@pytest.mark.cuda
def test_overlapping_launches_change_nothing(device: torch.device) -> None:
    m = mixer(900, device, **REAL, slow=6)
    mixed = m.projected[:, : m.conv_dim].clone()
    segments = chain_segments([Chain(4, 2, (64, 600), (5, 2)), Chain(0, 1, (236,), (1,))], device)
    results = []
    for pdl in (False, True):
        state = torch.ones(9, 32, 128, 128, device=device)
        for _ in range(10):
            out = gated_delta_prefill(
                mixed, m.projected, *m.parameters(), state, segments, config=cut(2, FEW, block_v=64), pdl=pdl
            )
        results.append((out, state))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
