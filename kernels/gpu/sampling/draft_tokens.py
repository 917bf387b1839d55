"""Draft tokens on the device: where a step's rows stand, how many of its tokens count, and what is drafted next.

Reference: services/engine/executors/cpu/speculation.py. The host plans a step while others run, and so does not know
how many of their draft tokens are accepted. For each state slot the device keeps the number of computed tokens, the
newest token, draft tokens behind it, and whether the request has ended. A step of B chunks that decode has `group` rows
for each: the newest token and draft tokens.

1. `place_rows` fills in the step's tokens, positions and output counts.
2. After sampling, `accept` compares draft tokens with the sampled ones and moves the slots on.
3. `next_draft` takes each sampled draft token, and places the row from which the next one is drafted. A block
   drafter's are taken all at once (draft_blocks).
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling.rows import (
    EDIT_ROW,
    EDITED,
    FLAGS,
    MIN_TOKENS,
    MOST_DRAFTS,
    MOST_OUTPUT,
    MOST_STOPS,
    PARAMETERS,
    STOPS,
)

COUNTED = int(MOST_DRAFTS.value)
"""Most draft tokens before a row that its edited logits count; `accept` takes no edited row behind more."""
ROOM_OF_SLOT = tl.constexpr(8)
MOST = int(ROOM_OF_SLOT.value)
"""Draft tokens that there is room for in a slot."""
CHUNK_WORDS = 8
"""int32 words of a chunk for `accept`: its slot (0: padding), the row of the batch of its first token that is sampled
behind, the place of that row among the sampled ones, the number of those rows, the tokens that its blocks hold, and 1
if it goes on from what the device knows of its slot."""

_SLOT = tl.constexpr(0)
_ROW = tl.constexpr(1)
_PLACE = tl.constexpr(2)
ROWS_WORD = 3
_ROWS = tl.constexpr(ROWS_WORD)
_ROOM = tl.constexpr(4)
_GOES_ON = tl.constexpr(5)
_WORDS = tl.constexpr(CHUNK_WORDS)
_PENDING = tl.constexpr(-1)
_DRAFT = tl.constexpr(-2)
UNWANTED = -2
"""Instead of the mask of a row: its token does not count, nor does one behind it."""
_UNWANTED = tl.constexpr(UNWANTED)
ERROR = tl.constexpr(1)
FLAGS_WORD = tl.constexpr(3)
ACCEPTED_SHIFT = 4
"""Bit of a row's flags from which on `accept` puts the number of its chunk's tokens that count, in 4 bits."""
_UNIT = tl.constexpr(1 << ACCEPTED_SHIFT)
_ACCEPTED = tl.constexpr(15 << ACCEPTED_SHIFT)


class _Slots(NamedTuple):
    computed: Any
    newest: Any
    drafts: Any
    ended: Any


class _Chain(NamedTuple):
    rows: Any
    slots: Any
    positions: Any
    room: Any
    next_ids: Any
    step: Any
    drafted: Any


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Tokens of the state slots as the device knows them, int32."""

    computed: Tensor
    """[num_slots]: tokens whose KV and state are in the cache."""
    newest: Tensor
    """[num_slots]: the token that was sampled last."""
    drafts: Tensor
    """[num_slots, MOST]: draft tokens behind it."""
    ended: Tensor
    """[num_slots]: 1 behind the last token of a request."""

    @classmethod
    def allocate(cls, newest: Tensor) -> SlotTokens:
        """Nothing computed yet; ``newest`` [num_slots] is the sampler's."""
        num_slots = newest.shape[0]
        computed, ended = torch.zeros_like(newest), torch.zeros_like(newest)
        return cls(computed, newest, torch.zeros(num_slots, MOST, dtype=torch.int32, device=newest.device), ended)

    def arguments(self) -> _Slots:
        return _Slots(self.computed, self.newest, self.drafts, self.ended)


@dataclass(frozen=True, slots=True)
class Chain:
    """Rows from which draft tokens are drawn one behind the other, one a chunk, int32 at fixed addresses."""

    rows: Tensor
    """[C]: row of the batch behind which the first draft token is drawn."""
    slots: Tensor
    """[C]: 0: nothing is drawn."""
    positions: Tensor
    """[C]: of the row of the mtp layer that drafts."""
    room: Tensor
    """[C]: tokens that the blocks of the slot hold."""
    next_ids: Tensor
    """[C]: the token behind that row, the draft token before."""
    step: Tensor
    """[3, C]: what the sampler needs of a row (see sample_rows)."""
    drafted: Tensor
    """[C, COUNTED]: draft tokens before the one that is drawn, -1 where there is none yet."""
    no_adapters: Tensor
    """[C]: zeros."""

    @classmethod
    def allocate(cls, chunks: int, device: torch.device | str) -> Chain:
        """Rows at which nothing is drawn."""
        # Each begins at a multiple of 16 bytes, so that every number of chunks runs the same variant of a kernel.
        rows, slots, positions, room, next_ids, none = torch.zeros(
            6, -(-chunks // 4) * 4, dtype=torch.int32, device=device
        )[:, :chunks]
        step = torch.zeros(3, chunks, dtype=torch.int32, device=device)
        drafted = torch.full((chunks, COUNTED), -1, dtype=torch.int32, device=device)
        return cls(rows, slots, positions, room, next_ids, step, drafted, none)

    def arguments(self) -> _Chain:
        return _Chain(self.rows, self.slots, self.positions, self.room, self.next_ids, self.step, self.drafted)


@triton.jit(do_not_specialize=["step_stride", "chunks"])
def _place_rows_kernel(tokens, positions, row_slots, step, step_stride, drafted, slots, chunks, GROUP: tl.constexpr):
    chunk = tl.program_id(0)
    places = tl.arange(0, MOST_DRAFTS)
    before = tl.full((MOST_DRAFTS,), -1, tl.int32)
    if chunk >= chunks:
        tl.store(drafted + (chunks * (GROUP - 1) + chunk) * MOST_DRAFTS + places, before)
        return
    begin = chunk * GROUP
    slot = tl.load(row_slots + begin)
    pending = tl.load(tokens + begin) == _PENDING
    shift = tl.where(pending, tl.load(slots.computed + slot) - tl.load(positions + begin), 0)
    gone = pending & (tl.load(slots.ended + slot) > 0)
    # Every thread has read the first row before any changes it.
    tl.debug_barrier()
    for index in tl.static_range(GROUP):
        row = begin + index
        token = tl.load(tokens + row)
        if index > 0:
            draft = tl.load(slots.drafts + slot * ROOM_OF_SLOT + (index - 1))
            token = tl.where(token == _DRAFT, draft, token)
            before = tl.where(places == index - 1, token, before)
        tl.store(drafted + row * MOST_DRAFTS + places, before)
        held = (tl.load(row_slots + row) > 0) & (gone == 0)
        tl.store(tokens + row, tl.where(held, token, 0))
        tl.store(positions + row, tl.where(held, tl.load(positions + row) + shift, 0))
        tl.store(row_slots + row, tl.where(held, slot, 0))
        tl.store(step + row, tl.where(held, slot, 0))
        tl.store(step + step_stride + row, tl.load(step + step_stride + row) + shift)


def place_rows(
    tokens: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    step: Tensor,
    drafted: Tensor,
    slots: SlotTokens,
    chunks: int,
    group: int,
    others: int = 0,
) -> None:
    """Fills in the rows of the chunks that decode, which are the first of a step.

    Args:
        tokens: [T] int32: −1 (the newest of the slot) first in a group, −2 for draft tokens, or known tokens.
        positions: [T] int32; behind a pending token the least ones.
        row_slots: [T] int32; 0 for padding and for the rows of a group, at its end, that have no token.
        step: [3, ≥ chunks · group] int32: slots and output counts of the sampled rows, those of the groups first.
        drafted: [≥ chunks · group + others, COUNTED] int32, gets the first draft tokens that each sampled row follows,
            -1 where there are fewer.
        slots: rows of requests that have ended get slot 0.
        chunks: groups.
        group: rows of a group.
        others: sampled rows behind the groups, which follow no draft token.
    """
    if chunks + others:
        arguments = (tokens, positions, row_slots, step, step.stride(0), drafted, slots.arguments(), chunks)
        _place_rows_kernel[(chunks + others,)](*arguments, GROUP=group, num_warps=1)


@triton.jit(do_not_specialize=["result_stride", "step_stride", "chain_stride", "vocab"])
def _accept_kernel(
    chunks,
    results,
    result_stride,
    step,
    step_stride,
    tokens,
    positions,
    next_ids,
    parameters,
    words,
    vocab,
    masks,
    slots,
    rejected,
    chain,
    chain_stride,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    about = chunks + chunk * _WORDS
    slot = tl.load(about + _SLOT)
    row = tl.load(about + _ROW)
    place = tl.load(about + _PLACE)
    rows = tl.load(about + _ROWS)
    known = parameters + slot * PARAMETERS
    stops = tl.load(known + STOPS + tl.arange(0, MOST_STOPS))
    most = tl.load(known + MOST_OUTPUT)
    least = tl.load(known + MIN_TOKENS)
    edited = (tl.load(known + FLAGS) & EDITED) != 0
    generated = words + tl.load(known + EDIT_ROW).to(tl.int64) * vocab
    count = tl.load(step + step_stride + place)
    ended = tl.where(tl.load(about + _GOES_ON) > 0, tl.load(slots.ended + slot), 0)
    alive = (ended == 0) & (slot > 0)
    accepted = 0
    newest = 0
    for index in tl.static_range(GROUP):
        inside = index < rows
        result = results + (place + index) * result_stride
        token = tl.load(result, mask=inside, other=0)
        flags = tl.load(result + FLAGS_WORD, mask=inside, other=0)
        draft = tl.load(tokens + row + index + 1, mask=index + 1 < rows, other=-1)
        wanted = tl.load(masks + place + index + 1, mask=index + 1 < rows, other=_UNWANTED) != _UNWANTED
        tl.store(next_ids + row + index, token, mask=inside)
        counts = alive & inside
        accepted += counts.to(tl.int32)
        tl.atomic_add(generated + token, 1, mask=counts & edited, sem="relaxed")
        newest = tl.where(counts, token, newest)
        number = count + index + 1
        stopped = (tl.sum((stops == token).to(tl.int32)) > 0) & (number > least)
        last = stopped | (number >= most) | ((flags & ERROR) != 0)
        ended = tl.where(counts & last, 1, ended)
        alive = counts & (last == 0) & wanted & (token == draft) & ((index < MOST_DRAFTS) | (edited == 0))
    position = tl.load(positions + row)
    # A row that was not sampled has the flags of a step before.
    first_flags = tl.load(results + place * result_stride + FLAGS_WORD, mask=slot > 0, other=0)
    first_flags -= first_flags & _ACCEPTED
    # Every thread has read what is written now.
    tl.debug_barrier()
    tl.store(results + place * result_stride + FLAGS_WORD, first_flags + accepted * _UNIT, mask=slot > 0)
    tl.store(slots.computed + slot, position + accepted, mask=accepted > 0)
    tl.store(slots.newest + slot, newest, mask=accepted > 0)
    tl.store(slots.ended + slot, ended, mask=accepted > 0)
    tl.store(rejected + chunk, rows - accepted)
    drafts = (accepted > 0) & (ended == 0)
    tl.store(chain.rows + chunk, row + tl.maximum(accepted, 1) - 1)
    tl.store(chain.slots + chunk, tl.where(drafts, slot, 0))
    tl.store(chain.positions + chunk, tl.where(drafts, position + accepted - 1, 0))
    tl.store(chain.room + chunk, tl.load(about + _ROOM))
    tl.store(chain.step + chunk, tl.where(drafts, slot, 0))
    tl.store(chain.step + chain_stride + chunk, count + accepted)
    tl.store(chain.step + 2 * chain_stride + chunk, -1)
    tl.store(chain.drafted + chunk * MOST_DRAFTS + tl.arange(0, MOST_DRAFTS), tl.full((MOST_DRAFTS,), -1, tl.int32))


def accept(
    chunks: Tensor,
    results: Tensor,
    step: Tensor,
    tokens: Tensor,
    positions: Tensor,
    next_ids: Tensor,
    parameters: Tensor,
    slots: SlotTokens,
    words: Tensor,
    masks: Tensor,
    rejected: Tensor,
    chain: Chain,
    group: int,
) -> None:
    """Decides how many of each chunk's tokens count: up to the first that is not the draft token behind it, a stop
    token, the last of its request, one whose sampling failed, or one before an unwanted row; with edited logits at most
    COUNTED + 1; none of a request that has ended. Moves the slots on.

    Args:
        chunks: [C, CHUNK_WORDS] int32, chunks that sample; the padding at the end has slot 0 and no rows.
        results: [R, ≥ 4] int32, of the sampler; the flags of a chunk's first row get the number, from bit
            ACCEPTED_SHIFT on.
        step: [3, R] int32: slots and output counts of the sampled rows.
        tokens, positions: [T] int32, as place_rows() leaves them.
        next_ids: [T] int32, gets the sampled token behind each sampled row.
        parameters: [num_slots, PARAMETERS] int32, of the sampling tables.
        slots: changed.
        words: [E, V] int32, the token words of sample_rows(): the tokens that count are counted.
        masks: [≥ R] int32, the mask of each sampled row, of which only UNWANTED matters.
        rejected: [≥ C] int32, gets how many of the rows do not count.
        chain: of at least C chunks, gets the row that the next draft token is drawn behind.
        group: most sampled rows of a chunk.
    """
    _accept_kernel[(chunks.shape[0],)](
        chunks,
        results,
        results.stride(0),
        step,
        step.stride(0),
        tokens,
        positions,
        next_ids,
        parameters,
        words,
        words.shape[1],
        masks,
        slots.arguments(),
        rejected,
        chain.arguments(),
        chain.step.stride(0),
        GROUP=group,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["result_stride", "chain_stride", "number"])
def _next_draft_kernel(results, result_stride, slots, chain, chain_stride, number):
    chunk = tl.program_id(0)
    slot = tl.load(chain.slots + chunk)
    token = tl.load(results + chunk * result_stride)
    failed = (tl.load(results + chunk * result_stride + FLAGS_WORD) & ERROR) != 0
    token = tl.where(failed, 0, token)
    position = tl.load(chain.positions + chunk) + 1
    goes_on = (slot > 0) & (position < tl.load(chain.room + chunk))
    count = tl.load(chain.step + chain_stride + chunk)
    tl.debug_barrier()
    tl.store(slots.drafts + slot * ROOM_OF_SLOT + number, token, mask=slot > 0)
    tl.store(chain.drafted + chunk * MOST_DRAFTS + number, token)
    tl.store(chain.next_ids + chunk, token)
    tl.store(chain.slots + chunk, tl.where(goes_on, slot, 0))
    tl.store(chain.step + chunk, tl.where(goes_on, slot, 0))
    tl.store(chain.positions + chunk, tl.where(goes_on, position, 0))
    tl.store(chain.step + chain_stride + chunk, count + 1)


def next_draft(results: Tensor, slots: SlotTokens, chain: Chain, number: int) -> None:
    """Takes the draft tokens that were drawn, and moves the chain on by one row. Where the blocks of a slot end, so
    does its chain, and the draft tokens behind are whatever they were.

    Args:
        results: [≥ C, ≥ 4] int32, of the sampler.
        chain: of C chunks, changed.
        number: 0 for the first draft token behind a step.
    """
    _next_draft_kernel[(chain.slots.shape[0],)](
        results, results.stride(0), slots.arguments(), chain.arguments(), chain.step.stride(0), number, num_warps=1
    )
