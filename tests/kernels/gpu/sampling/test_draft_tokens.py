"""Draft tokens on the device: rows placed, tokens accepted and chains moved on, against the rule in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.gpu.sampling.draft_blocks import Block, place_block, take_block
from kernels.gpu.sampling.draft_tokens import (
    ACCEPTED_SHIFT,
    CHUNK_WORDS,
    COUNTED,
    MOST,
    UNWANTED,
    Chain,
    SlotTokens,
    accept,
    next_draft,
    place_rows,
)
from kernels.gpu.sampling.rows import EDIT_ROW, EDITED, FLAGS, MIN_TOKENS, MOST_OUTPUT, MOST_STOPS, PARAMETERS, STOPS
from tests.kernels.gpu import interpreter  # noqa: F401

NUM_SLOTS, NEVER = 9, 1 << 30
ERROR = 1


@dataclass
class Slot:
    """A slot's request as the host would know it if it waited."""

    computed: int
    count: int
    newest: int
    stops: list[int] = field(default_factory=list)
    most: int = NEVER
    least: int = 0
    drafts: list[int] = field(default_factory=lambda: [0] * MOST)
    ended: bool = False


class Device:
    """Tensors of the kernels, filled from slots."""

    def __init__(self, slots: dict[int, Slot], device: torch.device) -> None:
        self.device = device
        self.tokens = SlotTokens.allocate(torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device))
        self.parameters = torch.zeros(NUM_SLOTS, int(PARAMETERS.value), dtype=torch.int32, device=device)
        self.parameters[:, STOPS.value : STOPS.value + MOST_STOPS.value] = -1
        for number, slot in slots.items():
            self.tokens.computed[number] = slot.computed
            self.tokens.newest[number] = slot.newest
            self.tokens.drafts[number] = torch.tensor(slot.drafts, dtype=torch.int32)
            self.tokens.ended[number] = int(slot.ended)
            self.parameters[number, MOST_OUTPUT.value] = slot.most
            self.parameters[number, MIN_TOKENS.value] = slot.least
            for place, stop in enumerate(slot.stops):
                self.parameters[number, STOPS.value + place] = stop

    def ints(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def test_rows_are_placed(device: torch.device) -> None:
    """A pending token and two draft tokens, a known one with a draft token, one alone, one that has ended, padding."""
    slots = {
        3: Slot(20, 5, 7, drafts=[11, 12, 13, 14, 0, 0, 0, 0]),
        5: Slot(0, 0, 0, drafts=[21, 22, 23, 24, 0, 0, 0, 0]),
        2: Slot(9, 2, 6),
        4: Slot(30, 8, 9, ended=True),
    }
    on = Device(slots, device)
    tokens = on.ints([-1, -2, -2, 42, -2, 0, -1, 0, 0, -1, -2, -2, 0, 0, 0, 99])
    positions = on.ints([17, 18, 19, 6, 7, 0, 9, 0, 0, 28, 29, 30, 0, 0, 0, 55])
    row_slots = on.ints([3, 3, 3, 5, 5, 0, 2, 0, 0, 4, 4, 4, 0, 0, 0, 8])
    step = torch.zeros(3, 16, dtype=torch.int32, device=device)
    step[0], step[1] = row_slots, on.ints([2, 3, 4, 1, 2, 0, 2, 0, 0, 6, 7, 8, 0, 0, 0, 5])
    step[2] = -1
    drafted = on.ints([[9] * COUNTED] * 17)
    place_rows(tokens, positions, row_slots, step, drafted, on.tokens, chunks=5, group=3, others=1)
    assert tokens.tolist() == [-1, 11, 12, 42, 21, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 99]
    assert positions.tolist() == [20, 21, 22, 6, 7, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 55]
    assert row_slots.tolist() == [3, 3, 3, 5, 5, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 8]
    assert step[0].tolist() == row_slots.tolist()
    live = [0, 1, 2, 3, 4, 6, 15]
    assert step[1, live].tolist() == [5, 6, 7, 1, 2, 2, 5]
    assert step[2].tolist() == [-1] * 16
    none = [-1] * COUNTED
    assert drafted[[0, 1, 2, 3, 4, 6, 15, 16]].tolist() == [
        none,
        [11, -1, -1, -1],
        [11, 12, -1, -1],
        none,
        [21, -1, -1, -1],
        none,
        none,
        [9] * COUNTED,
    ]
    place_rows(tokens, positions, row_slots, step, drafted, on.tokens, chunks=0, group=1, others=2)
    assert drafted[:2].tolist() == [none, none]


def expected(slot: Slot, sampled: list[int], drafts: list[int], failed: int | None) -> tuple[int, bool]:
    """How many of the sampled tokens count, and whether the request ends with the last of them."""
    for index, token in enumerate(sampled):
        number = slot.count + index + 1
        if index == failed or (token in slot.stops and number > slot.least) or number >= slot.most:
            return index + 1, True
        if index == len(drafts) or token != drafts[index]:
            return index + 1, False
    raise AssertionError


@pytest.mark.parametrize("seed", range(6))
def test_tokens_that_count(device: torch.device, seed: int) -> None:
    """Chunks of decodes with and without draft tokens, prompts that end, and padding, in one step."""
    chance = random.Random(seed)
    group = chance.randrange(2, MOST + 2)
    slots: dict[int, Slot] = {}
    tokens, positions, words, results, counts = [], [], [], [], []
    rows_of: dict[int, tuple[list[int], list[int], int | None]] = {}
    masks: list[int] = []
    for number in chance.sample(range(1, NUM_SLOTS), 6):
        slot = Slot(chance.randrange(5, 50), chance.randrange(1, 9), 1, stops=chance.sample(range(8), 1))
        slot.most = slot.count + chance.randrange(1, 9)
        slot.least = chance.choice((0, slot.count + chance.randrange(4)))
        goes_on = chance.random() < 0.8
        slot.ended = chance.random() < (0.2 if goes_on else 0.5)
        slots[number] = slot
        rows = chance.randrange(1, group + 1)
        drafts = [chance.randrange(4) for _ in range(rows - 1)]
        drawn = [draft if chance.random() < 0.7 else chance.randrange(8) for draft in [*drafts, 3]]
        failed = chance.randrange(rows) if chance.random() < 0.2 else None
        words.append([number, len(tokens), len(results), rows, 64, int(goes_on), 0, 0])
        tokens += [slot.newest, *drafts]
        positions += range(slot.computed, slot.computed + rows)
        flags = [2 + 3 * 256 + (ERROR if row == failed else 0) + (5 << ACCEPTED_SHIFT) for row in range(rows)]
        results += [[token, 0, 0, flag] for token, flag in zip(drawn, flags, strict=True)]
        counts += range(slot.count, slot.count + rows)
        dead = goes_on and slot.ended
        wanted = chance.randrange(1, rows + 1) if chance.random() < 0.3 else rows
        masks += [chance.choice((-1, 3)) if row < wanted else UNWANTED for row in range(rows)]
        rows_of[number] = (drawn, [] if dead else drafts[: wanted - 1], failed)
    on = Device(slots, device)
    penalised = [number for number in slots if chance.random() < 0.6]
    for number in penalised:  # rows behind more draft tokens than are counted do not count
        drawn, drafts, failed = rows_of[number]
        rows_of[number] = drawn, drafts[:COUNTED], failed
    for row, number in enumerate(penalised):
        on.parameters[number, FLAGS.value] = EDITED.value
        on.parameters[number, EDIT_ROW.value] = row
    generated = torch.full((len(penalised), 8), 5, dtype=torch.int32, device=device)
    words += [[0] * CHUNK_WORDS] * 2
    step = on.ints([[0] * len(counts), counts, [-1] * len(counts)])
    found = on.ints(results)
    next_ids, rejected = torch.full((len(tokens) + 1,), -7, dtype=torch.int32, device=device), on.ints([-9] * 8)
    chain = Chain.allocate(8, device)
    chain.slots.fill_(3)
    chain.drafted.fill_(6)
    before = [tensor.clone() for tensor in (on.tokens.computed, on.tokens.newest, on.tokens.ended)]
    accept(
        on.ints(words),
        found,
        step,
        on.ints([*tokens, 0]),
        on.ints([*positions, 0]),
        next_ids,
        on.parameters,
        on.tokens,
        generated,
        on.ints(masks),
        rejected,
        chain,
        group,
    )
    assert next_ids.tolist() == [row[0] for row in results] + [-7]
    for index, (number, row, place, rows, _, goes_on, *_) in enumerate(words[:6]):
        slot = slots[number]
        drawn, drafts, failed = rows_of[number]
        dead = goes_on and slot.ended
        count, ended = (0, True) if dead else expected(slot, drawn, drafts, failed)
        flags = int(found[place, 3])
        assert (flags >> ACCEPTED_SHIFT) & 15 == count
        assert (flags & 3, flags >> 8) == (results[place][3] & 3, 3)
        assert int(rejected[index]) == rows - count
        if dead:
            assert [int(tensor[number]) for tensor in (on.tokens.computed, on.tokens.newest)] == [slot.computed, 1]
        else:
            assert int(on.tokens.computed[number]) == slot.computed + count
            assert int(on.tokens.newest[number]) == drawn[count - 1]
            assert bool(on.tokens.ended[number]) == ended
        assert int(chain.slots[index]) == int(chain.step[0, index]) == (0 if ended else number)
        if number in penalised:
            counted = generated[penalised.index(number)].tolist()
            assert counted == [5 + drawn[:count].count(token) for token in range(8)]
        assert chain.drafted[index].tolist() == [-1] * COUNTED
        if not ended:
            assert int(chain.rows[index]) == row + count - 1
            assert int(chain.positions[index]) == slot.computed + count - 1
            assert int(chain.step[1, index]) == slot.count + count
    assert chain.slots[6:].tolist() == [0, 0]
    others = [number for number in range(NUM_SLOTS) if number not in slots]
    for old, new in zip(before, (on.tokens.computed, on.tokens.newest, on.tokens.ended), strict=True):
        assert torch.equal(old[others], new[others])


def test_a_chain_moves_on(device: torch.device) -> None:
    """One that reaches the end of its blocks drafts no more, nor does one whose request has ended."""
    on = Device({}, device)
    chain = Chain.allocate(4, device)
    chain.slots.copy_(on.ints([5, 0, 7, 2]))
    chain.step[0] = chain.slots
    chain.positions.copy_(on.ints([14, 0, 14, 3]))
    chain.room.copy_(on.ints([16, 0, 32, 32]))
    chain.step[1] = on.ints([4, 0, 9, 1])
    drawn = [[31, 32, 33, 34], [41, 42, 43, 44], [51, 52, 53, 54]]
    for number, tokens in enumerate(drawn):
        results = on.ints([[token, 0, 0, 0] for token in tokens])
        if number == 1:
            results[3, 3] = ERROR
        next_draft(results, on.tokens, chain, number)
        assert chain.next_ids.tolist()[:3] == tokens[:3]
        assert chain.drafted[0].tolist() == [*(drawn[place][0] for place in range(number + 1)), *[-1] * (3 - number)]
    assert on.tokens.drafts[5, :3].tolist() == [31, 41, 0]
    assert on.tokens.drafts[7, :3].tolist() == [33, 43, 53]
    assert on.tokens.drafts[2, :3].tolist() == [34, 0, 54]
    assert int(on.tokens.drafts[0].sum()) == 0
    assert chain.slots.tolist() == chain.step[0].tolist() == [0, 0, 7, 2]
    assert chain.positions.tolist() == [0, 0, 17, 6]
    assert chain.step[1].tolist()[2:] == [12, 4]


def test_a_block_is_placed_and_taken(device: torch.device) -> None:
    """Two rows behind the first one of each chunk: of one whose blocks end between them, and of one that draws none."""
    on = Device({}, device)
    chain, block = Chain.allocate(3, device), Block.allocate(3, 3, device)
    chain.slots.copy_(on.ints([5, 0, 7]))
    chain.positions.copy_(on.ints([14, 0, 3]))
    chain.room.copy_(on.ints([16, 0, 32]))
    chain.step[0], chain.step[1] = chain.slots, on.ints([4, 0, 9])
    block.slots.fill_(8)
    place_block(chain, block)
    assert block.slots.tolist() == [5, 0, 0, 0, 7, 7]
    assert block.positions.tolist() == [15, 0, 0, 0, 4, 5]
    assert block.step[0].tolist() == [5, 5, 5, 0, 0, 0, 7, 7, 7]
    assert block.step[1].tolist() == [4, 5, 6, 0, 1, 2, 9, 10, 11]
    assert block.step[2].tolist() == [-1] * 9
    results = on.ints([[30 + row, 0, 0, ERROR if row == 7 else 2] for row in range(9)])
    take_block(results, on.tokens, chain, 3)
    assert on.tokens.drafts[5, :4].tolist() == [30, 31, 32, 0]
    assert on.tokens.drafts[7, :4].tolist() == [36, 0, 38, 0]
    assert int(on.tokens.drafts[0].sum()) == 0
