"""Rows with draft tokens: against float64, against steps of one token, and rolled back to those that count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.delta.conv1d import conv_decode
from kernels.gpu.delta.conv_verify import conv_verify, move_windows
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.verify import cut_spans, gated_delta_verify
from kernels.gpu.delta.waiting_writes import WaitingWrites
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.delta.support import exact_delta, mixer
from tests.kernels.gpu.delta.test_waiting_writes import waiting_for, whole

SLOTS = (4, 2, 5)
ROUNDS = ((2, 2, 1), (5, 5, 3), (4, 1, 4), (5, 2, 0), (3, 3, 3))
"""Of each round: the rows of a group, and for two of the sequences how many of their tokens count. The third one has a
token alone in each round."""


def whole_of(states: Tensor, waiting: WaitingWrites, slot: int) -> Tensor:
    return whole(states[0], waiting[0], slot)


def groups(group: int, device: torch.device) -> Tensor:
    """Slots of the rows: two sequences with draft tokens, one without, and padding."""
    alone = [SLOTS[2], *[0] * (group - 1)]
    rows = [slot for slot in SLOTS[:2] for _ in range(group)] + alone + [0] * group
    return torch.tensor(rows, dtype=torch.int32, device=device)


@pytest.mark.sampled
@pytest.mark.parametrize(("dims", "room"), [((2, 4, 16, 16), 8), ((3, 3, 12, 10), 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_the_tokens_that_count(
    device: torch.device, dtype: torch.dtype, dims: tuple[int, int, int, int], room: int
) -> None:
    """Between two rounds a step of one token for all, which writes states back. The state of a wrong token is gone."""
    shape = dict(zip(("key_heads", "heads", "key_dim", "value_dim"), dims, strict=True))
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(1, 6, *dims[1:], generator=generator).to(device)
    waiting: WaitingWrites | None = None
    exact = {slot: state[0, slot].double() for slot in SLOTS}
    limits = {"atol": 5e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 2**-5}
    for turn, (group, *counts) in enumerate(ROUNDS):
        slots = groups(group, device)
        m = mixer(len(slots) + 3, device, dtype=dtype, seed=turn, **shape)
        mixed = m.projected[:, : m.conv_dim].clone()
        if waiting is None:
            one = waiting_for(m, 6, room)
            waiting = WaitingWrites(*(pool[None].clone() for pool in one.pools()))
        out = gated_delta_verify(
            mixed[:-3], m.projected[:-3], *m.parameters(), state[0], slots, waiting[0], group, num_warps=1
        )
        rejected = torch.tensor([group - counts[0], group - counts[1], 0, 0], dtype=torch.int32, device=device)
        cut_spans(waiting, slots, rejected, group)
        for index, (slot, count) in enumerate(zip(SLOTS, (*counts, 1), strict=True)):
            rows = slice(index * group, index * group + (1 if index == 2 else group))
            expected, _ = exact_delta(m, mixed[rows], m.projected[rows], exact[slot])
            torch.testing.assert_close(out[rows].double(), expected, **limits)
            rows = slice(rows.start, rows.start + count)
            if count:
                exact[slot] = exact_delta(m, mixed[rows], m.projected[rows], exact[slot])[1]
            torch.testing.assert_close(whole_of(state, waiting, slot), exact[slot], **limits)
        if turn % 2:
            last = slice(len(mixed) - 3, None)
            index = torch.tensor(SLOTS, dtype=torch.int32, device=device)
            gated_delta_step(
                mixed[last], m.projected[last], *m.parameters(), state[0], index, waiting=waiting[0], late=turn == 3
            )
            for row, slot in enumerate(SLOTS, start=len(mixed) - 3):
                rows = slice(row, row + 1)
                exact[slot] = exact_delta(m, mixed[rows], m.projected[rows], exact[slot])[1]


def test_outputs_are_those_of_the_step(device: torch.device) -> None:
    """The same arithmetic: whether a token was a draft token changes no bit of what follows."""
    m = mixer(4, device)
    mixed = m.projected[:, : m.conv_dim].clone()
    state = torch.randn(3, 4, 16, 16, device=device)
    one, waiting = state.clone(), waiting_for(m, 3, 8)
    slots = torch.ones(4, dtype=torch.int32, device=device)
    out = gated_delta_verify(mixed, m.projected, *m.parameters(), state, slots, waiting, 4)
    for row in range(4):
        here = (mixed[row : row + 1], m.projected[row : row + 1], *m.parameters(), one, slots[:1])
        assert torch.equal(gated_delta_step(*here), out[row : row + 1])
    torch.testing.assert_close(whole(state, waiting, 1), one[1].double(), atol=2e-5, rtol=1e-5)


def inputs(rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, channels + 8, generator=generator).to(device, dtype)
    return x, torch.randn(4, channels, generator=generator).to(device, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_the_tokens_that_count(device: torch.device, dtype: torch.dtype) -> None:
    channels = 40
    state = torch.randn(2, 6, 3, channels, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    kept = torch.full((2, 24, channels), float("nan"), dtype=dtype, device=device)
    for group, *counts in ROUNDS:
        slots = groups(group, device)
        before = state.clone()
        x, weight = inputs(len(slots), channels, dtype, device)
        out = [conv_verify(x, weight, state[n], slots, kept[n], group, block=32) for n in range(2)]
        assert torch.equal(state, before)
        rejected = torch.tensor([group - counts[0], group - counts[1], 0, 0], dtype=torch.int32, device=device)
        move_windows(state, kept, slots, rejected, group, block=16)
        for n in range(2):
            for index, (slot, count) in enumerate(zip(SLOTS, (*counts, 1), strict=True)):
                for row in range(1 if index == 2 else group):
                    at = index * group + row
                    alone = torch.tensor([slot], dtype=torch.int32, device=device)
                    y = conv_decode(x[at : at + 1], weight, before[n], alone)
                    assert torch.equal(y[0], out[n][at])
                    if row < count:
                        last = before[n, slot].clone()
                if count:
                    assert torch.equal(state[n, slot], last)
                else:
                    past = torch.cat((state[n, slot], x[index * group : index * group + group, :channels]))
                    assert torch.equal(before[n, slot], past[group:])
        untouched = [1, 3]
        assert torch.equal(state[:, untouched], before[:, untouched])


def test_groups_are_checked(device: torch.device) -> None:
    m = mixer(4, device)
    mixed = m.projected[:, : m.conv_dim].clone()
    state, slots = torch.zeros(3, 4, 16, 16, device=device), torch.ones(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="groups of 4"):
        gated_delta_verify(mixed, m.projected, *m.parameters(), state, slots, waiting_for(m, 3, 3), 4)
    x, weight = inputs(4, 40, torch.float32, device)
    windows = torch.zeros(3, 3, 40, device=device)
    with pytest.raises(ValueError, match="their inputs go to"):
        conv_verify(x, weight, windows, slots, torch.zeros(3, 40, device=device), 2)
