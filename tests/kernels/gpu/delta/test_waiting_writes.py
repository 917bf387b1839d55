"""Writes that wait beside their states: every token against float64, whatever has been written back by then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.chunk_configs import EXACT, ChunkConfig, PieceConfig
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.waiting_writes import WaitingWrites
from kernels.gpu.segments import Segments
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.support import CHAIN_SLOTS, Chain, Mixer, chain_segments, exact_delta, mixer

FLOAT32 = {"atol": 2e-5, "rtol": 1e-5}


def waiting_for(m: Mixer, slots: int, room: int) -> WaitingWrites:
    return WaitingWrites.allocate(
        slots,
        heads=m.heads,
        key_dim=m.key_dim,
        value_dim=m.value_dim,
        room=room,
        dtype=m.projected.dtype,
        device=m.projected.device,
    )


def whole(state: Tensor, waiting: WaitingWrites, slot: int) -> Tensor:
    """[heads, key_dim, value_dim] float64: a state and what waits for it."""
    heads = []
    for head, s in enumerate(state[slot].double()):
        spans = waiting.spans[slot, head].unique()
        assert len(spans) == 1
        first, end = divmod(int(spans), 16)
        assert first <= end <= waiting.room
        for write in range(first, end):
            k, delta, g = (pool[slot, head, write].double() for pool in waiting.pools()[1:])
            s = g.exp() * s + k[:, None] * delta[None, :]
        heads.append(s)
    return torch.stack(heads)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "room", "part"),
    [(2, 4, 16, 16, 1, 128), (2, 4, 16, 16, 8, 128), (3, 3, 12, 10, 3, 128), (1, 5, 8, 24, 2, 4), (3, 3, 12, 10, 8, 4)],
)
def test_steps(
    device: torch.device, key_heads: int, heads: int, key_dim: int, value_dim: int, room: int, part: int
) -> None:
    tokens, slots = 11, [4, 2]
    shape = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    m = mixer(2 * tokens, device, **shape)
    mixed = m.projected[:, : m.conv_dim].clone()
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(5, heads, key_dim, value_dim, generator=generator).to(device)
    waiting, before = waiting_for(m, 5, room), state.clone()
    exact = {slot: before[slot].double() for slot in slots}
    index, written = torch.tensor(slots, dtype=torch.int32, device=device), 0
    for token in range(tokens):
        rows, old = slice(2 * token, 2 * token + 2), state.clone()
        here = (mixed[rows], m.projected[rows])
        out = gated_delta_step(*here, *m.parameters(), state, index, waiting=waiting, late=True, part=part)
        written += int((state != old).flatten(2).any(2).sum())
        for row, slot in enumerate(slots):
            expected, exact[slot] = exact_delta(m, *(each[row : row + 1] for each in here), exact[slot])
            torch.testing.assert_close(out[row].double(), expected[0], **FLOAT32)
            torch.testing.assert_close(whole(state, waiting, slot), exact[slot], **FLOAT32)
    assert written == 2 * heads * ((tokens - 1) // room)
    assert torch.equal(state[[0, 1, 3]], before[[0, 1, 3]])
    assert all(not pool[[0, 1, 3]].any() for pool in waiting.pools())


def test_prompts_before_between_and_behind(device: torch.device) -> None:
    """A prompt's state has nothing waiting, whatever its slot had; one behind decodes takes in what waits."""
    m = mixer(60, device, heads=4)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.full((3, 4, 16, 16), float("nan"), device=device)
    waiting = waiting_for(m, 3, 8)
    for pool in waiting.pools()[1:]:
        pool.fill_(float("nan"))
    waiting.spans.fill_(7)
    out = torch.empty(60, 64, device=device)
    expected, final = exact_delta(m, mixed, m.projected, torch.zeros(4, 16, 16, device=device))

    def prompt(begin: int, end: int) -> None:
        segments = Segments.build([end - begin], [begin], [1], [0], device, first_row=begin)
        gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, waiting=waiting, out=out)

    def step(token: int) -> None:
        here = slice(token, token + 1)
        slots = torch.ones(1, dtype=torch.int32, device=device)
        gated_delta_step(
            mixed[here], m.projected[here], *m.parameters(), state, slots, waiting=waiting, late=True, out=out[here]
        )

    prompt(0, 20)
    # Heads are written back in different steps.
    assert [int(span) for span in waiting.spans[1, :, 0]] == [0, 17, 34, 51]
    cleared = waiting_for(m, 3, 8)
    cleared.clear()
    assert torch.equal(cleared.spans[1], waiting.spans[1])
    for token in range(20, 33):
        step(token)
    prompt(33, 50)
    for token in range(50, 60):
        step(token)
    torch.testing.assert_close(out.double(), expected, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(whole(state, waiting, 1), final, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [EXACT, replace(EXACT, pieces=PieceConfig(1, 16, 4, 1))])
def test_nothing_waits_behind_any_link_of_a_chain(device: torch.device, config: ChunkConfig) -> None:
    """What waits of the state before goes into all of them."""
    m = mixer(48, device, heads=4)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(CHAIN_SLOTS, 4, 16, 16, generator=torch.Generator().manual_seed(4)).to(device)
    waiting, slots = waiting_for(m, CHAIN_SLOTS, 8), torch.full((1,), 2, dtype=torch.int32, device=device)
    waiting.spans[[5, 6]] = 7  # as others left them
    for pool in waiting.pools()[1:]:
        pool[[5, 6]] = float("nan")
    exact = state[2].double()
    for token in range(3):
        here = (mixed[token : token + 1], m.projected[token : token + 1])
        gated_delta_step(*here, *m.parameters(), state, slots, waiting=waiting, late=True)
        _, exact = exact_delta(m, *here, exact)
    assert int(waiting.spans[2].max()) & 15
    chain = Chain(3, 2, (9, 17, 19), (5, 6, 2))
    segments = chain_segments([chain], device, first_row=3)
    out = gated_delta_prefill(mixed, m.projected, *m.parameters(), state, segments, waiting=waiting, config=config)
    begin = 3
    for length, target in zip(chain.lengths, chain.targets, strict=True):
        rows = slice(begin, begin + length)
        expected, exact = exact_delta(m, mixed[rows], m.projected[rows], exact)
        torch.testing.assert_close(out[rows].double(), expected, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(whole(state, waiting, target), exact, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(state[target].double(), exact, atol=5e-5, rtol=1e-5)
        begin += length


def test_written_back_at_once(device: torch.device) -> None:
    """In any order with steps whose writes wait."""
    m = mixer(9, device)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(4)).to(device)
    waiting, slots = waiting_for(m, 2, 8), torch.ones(1, dtype=torch.int32, device=device)
    expected, final = exact_delta(m, mixed, m.projected, state[1].clone())
    for token, late in enumerate([True, True, False, False, True, True, True, False, False]):
        here = slice(token, token + 1)
        inputs = (mixed[here], m.projected[here], *m.parameters(), state, slots)
        out = gated_delta_step(*inputs, waiting=waiting, late=late)
        torch.testing.assert_close(out.double(), expected[here], **FLOAT32)
        assert late or torch.equal(waiting.spans // 16, waiting.spans % 16)
    torch.testing.assert_close(state[1].double(), final, **FLOAT32)


def test_bfloat16(device: torch.device) -> None:
    """Keys wait as they came; a state in bfloat16 is rounded once for all that waited instead of once a token."""
    tokens = 16
    m = mixer(tokens, device, dtype=torch.bfloat16)
    mixed = m.projected[:, : m.conv_dim].clone()
    start = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(4)).to(device).bfloat16()
    expected, final = exact_delta(m, mixed, m.projected, start[1])
    slots, errors = torch.ones(1, dtype=torch.int32, device=device), []
    for room in (0, 8):
        state, waiting = start.clone(), waiting_for(m, 2, room) if room else None
        for token in range(tokens):
            here = slice(token, token + 1)
            out = gated_delta_step(
                mixed[here], m.projected[here], *m.parameters(), state, slots, waiting=waiting, late=True
            )
            if waiting:
                torch.testing.assert_close(out.double(), expected[here], atol=0.02, rtol=2**-5)
        after = whole(state, waiting, 1) if waiting else state[1].double()
        errors.append(float((after - final).norm()))
    assert errors[1] < errors[0] / 2


def test_extreme_decays(device: torch.device) -> None:
    """Nothing overflows where a decay vanishes between writes that wait."""
    m = mixer(12, device)
    m.projected[:, -4:] = torch.tensor([-90.0, 90.0, -20.0, 30.0], device=device).repeat(3)[:, None]
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(4)).to(device)
    waiting, slots = waiting_for(m, 2, 8), torch.ones(1, dtype=torch.int32, device=device)
    expected, final = exact_delta(m, mixed, m.projected, state[1].clone())
    for token in range(12):
        here = slice(token, token + 1)
        out = gated_delta_step(
            mixed[here], m.projected[here], *m.parameters(), state, slots, waiting=waiting, late=True
        )
        torch.testing.assert_close(out.double(), expected[here], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(whole(state, waiting, 1), final, atol=1e-5, rtol=1e-5)


def test_padding_stays_within_its_scratch(device: torch.device) -> None:
    m = mixer(3, device)
    state, waiting = torch.full((2, 4, 16, 16), float("nan"), device=device), waiting_for(m, 2, 3)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(7):
        gated_delta_step(
            m.projected[:, : m.conv_dim], m.projected, *m.parameters(), state, slots, waiting=waiting, late=True
        )
        assert int((waiting.spans[0] % 16).max()) <= 3
    assert all(not pool[1].any() for pool in waiting.pools())


def test_shapes_are_checked(device: torch.device) -> None:
    m = mixer(1, device)
    slots = torch.ones(1, dtype=torch.int32, device=device)
    state = torch.zeros(2, 4, 16, 16, device=device)
    with pytest.raises(ValueError, match="do not go with"):
        gated_delta_step(
            m.projected[:, : m.conv_dim], m.projected, *m.parameters(), state, slots, waiting=waiting_for(m, 3, 2)
        )
    with pytest.raises(ValueError, match="not 9"):
        waiting_for(m, 2, 9)


@pytest.mark.cuda
@pytest.mark.parametrize("late", [True, None])
def test_the_real_shape(device: torch.device, late: bool | None) -> None:
    """Also as the number of rows chooses: a large batch that shrinks goes from writes that wait to none."""
    tokens, rows = 12, 64
    shape = {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": 128}
    m = mixer(tokens * rows, device, dtype=torch.bfloat16, **shape)
    mixed = m.projected[:, : m.conv_dim].contiguous()
    state = torch.randn(rows + 1, 32, 128, 128, generator=torch.Generator().manual_seed(3)).to(device)
    waiting, slots = waiting_for(m, rows + 1, 8), torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    waiting.clear()
    exact = {row: state[row + 1].double() for row in (0, 3)}
    for token in range(tokens):
        count = rows if token < tokens // 2 else 4
        here = slice(token * rows, token * rows + count)
        inputs = (mixed[here], m.projected[here])
        out = gated_delta_step(*inputs, *m.parameters(), state, slots[:count], waiting=waiting, late=late)
        for row, before in exact.items():
            expected, exact[row] = exact_delta(m, *(each[row : row + 1] for each in inputs), before)
            torch.testing.assert_close(out[row].double(), expected[0], atol=2e-3, rtol=2**-7)
    for row, final in exact.items():
        torch.testing.assert_close(whole(state, waiting, row + 1), final, atol=1e-4, rtol=1e-4)
