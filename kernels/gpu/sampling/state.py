"""State of the sampling kernels: their arguments, results for each other and for the host, begin and end of a row."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.sampling.rows import (
    ALTERNATIVES,
    EDIT_ROW,
    EDITED,
    FLAGS,
    FORCED,
    LOGPROB,
    PARAMETERS,
    edited_logits,
    first_of,
    heated,
)

# Partial results: one float32 a block of each row.
RAW_MAX = tl.constexpr(0)
HEATED_SUM = tl.constexpr(1)
"""Sum of exp(x / temperature - the block's largest)."""
RAW_SUM = tl.constexpr(2)
BEST = tl.constexpr(3)
"""Largest final logit of the block."""
BEST_SUM = tl.constexpr(4)
"""Sum of exp(final logit - BEST)."""
WINNER = tl.constexpr(5)
"""The token that wins the race of the block: bits of an int32."""
PARTIALS = tl.constexpr(6)

# State of a row between kernels: float32.
LOG_Z = tl.constexpr(0)
RAW_LOG_Z = tl.constexpr(1)
ROW_BEST = tl.constexpr(2)
LOWEST = tl.constexpr(3)
"""Smallest logit that min_p lets pass."""
FLOOR = tl.constexpr(4)
"""Distance from the best beyond which no token can be allowed."""
CANDIDATE_LOGIT = tl.constexpr(5)
FLOATS = tl.constexpr(8)

# State of a row between kernels: int64.
PHASE = tl.constexpr(0)
LEVEL = tl.constexpr(1)
ACTIVE = tl.constexpr(2)
"""Programs of the next kernel that have something to do in this row."""
PREFIX_HIGH = tl.constexpr(3)
PREFIX_LOW = tl.constexpr(4)
BASE_COUNT = tl.constexpr(5)
BASE_MASS = tl.constexpr(6)
TARGET = tl.constexpr(7)
CUT_HIGH = tl.constexpr(8)
CUT_LOW = tl.constexpr(9)
CANDIDATE = tl.constexpr(10)
"""The token that may be in the nucleus."""
ABOVE = tl.constexpr(11)
"""Mass of the tokens more likely than the candidate; 0 between kernels."""
INTEGERS = tl.constexpr(16)

FINISHED = tl.constexpr(0)
SELECT_COUNT = tl.constexpr(1)
"""Looking for the top_k-th logit."""
SELECT_MASS = tl.constexpr(2)
"""Looking for the logit at which the mass reaches top_p."""
SELECTED = tl.constexpr(3)
CHECK = tl.constexpr(4)
RACE_AGAIN = tl.constexpr(5)

RESULT_WORDS = tl.constexpr(4)
"""token, bits of sampling_logprob, bits of logprob, flags (1: error, 2: has logprob, from bit 8 on: alternatives)."""
MOST_ALTERNATIVES = tl.constexpr(20)
EVERYTHING_LOW = tl.constexpr(2048 * 2048 - 1)


class Batch(NamedTuple):
    """The rows of a step, as every kernel takes them. Not specialized on: each step has others."""

    rows: Any
    step: Any
    """[3, rows] int32: the state slot of each row (0: padding), its output count and, of FORCED ones, the token."""
    results: Any
    result_stride: Any


class Tables(NamedTuple):
    """Everything that rows are looked up in, as every kernel takes it; see sampling.sample_rows and SamplingBuffers."""

    logits: Any
    logits_stride: Any
    vocab: Any
    parameters: Any
    words: Any
    """None: no row has edits."""
    biases: Any
    """None: no row has a logit_bias."""
    drafted: Any
    """[rows, MOST_DRAFTS] int32: draft tokens that a row follows, which count as if generated; -1: none. None: no row
    has any, and what is drawn is counted at once."""
    mask_rows: Any
    """[rows] int32: the mask of each row, -1: none. None: no row has one."""
    masks: Any
    """[masks, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 says whether token t is allowed."""
    last_tokens: Any
    partials: Any
    floats: Any
    integers: Any
    tickets: Any
    masses: Any
    counts: Any
    mass_scale: Any
    """Value of a probability mass of 1 in the integer histograms."""


class Row(NamedTuple):
    """Pointers to what other kernels left about a row."""

    index: Any
    floats: Any
    integers: Any
    partial: Any
    """[PARTIALS, BLOCKS]."""
    ticket: Any


class Request(NamedTuple):
    """Parameters of a row's request, and its logits."""

    row: Any
    slot: Any
    output_count: Any
    parameters: Any
    flags: Any
    logits: Any
    mask: Any
    """Number of the row's mask, -1: none."""


@triton.jit
def open_row(tables, axis: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Begin of every kernel: lets the next one start, waits for the one ahead; the row of this program."""
    row = tl.program_id(axis).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    return Row(
        row,
        tables.floats + row * FLOATS,
        tables.integers + row * INTEGERS,
        tables.partials + row * PARTIALS * BLOCKS,
        tables.tickets + row,
    )


@triton.jit
def request_of(row, slot, batch, tables):
    parameters = tables.parameters + slot * PARAMETERS
    mask = tl.full((), -1, tl.int32)
    if tables.masks is not None:
        mask = tl.load(tables.mask_rows + row.index)
    return Request(
        row.index,
        slot,
        tl.load(batch.step + batch.rows + row.index),
        parameters,
        tl.load(parameters + FLAGS),
        tables.logits + row.index * tables.logits_stride,
        mask,
    )


@triton.jit
def load_request(row, batch, tables):
    """Parameters of a row that is no padding."""
    return request_of(row, tl.load(batch.step + row.index), batch, tables)


@triton.jit
def load_block(request, block, tables, BLOCK: tl.constexpr):
    """A block's tokens [BLOCK], which of them exist, and their logits as the model gave them, float32."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < tables.vocab
    return column, inside, tl.load(request.logits + column, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def load_final(request, block, tables, BLOCK: tl.constexpr):
    """Same as load_block, with all edits and the temperature applied."""
    column, inside, raw = load_block(request, block, tables, BLOCK)
    return column, inside, edited_logits(raw, column, inside, request, tables)


@triton.jit
def final_logit(request, token, tables):
    """The same of one token."""
    x = tl.load(request.logits + token).to(tl.float32)
    return edited_logits(x, token, token >= 0, request, tables)


@triton.jit
def bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def finish(token, row, request, log_z, raw_log_z, batch, tables):
    """Writes the row's token, its log-probabilities and the books that the next step reads.

    Args:
        token: that was drawn. A forced row takes its own in place of it, and all else is as if that had been drawn.
    """
    forced = tl.load(batch.step + 2 * batch.rows + row.index)
    token = tl.where((request.flags & FORCED) != 0, forced, token)
    token = tl.minimum(tl.maximum(token, 0), tables.vocab - 1)
    x = tl.load(request.logits + token).to(tl.float32)
    logprob = heated(x, request.parameters) - log_z
    status = tl.where(logprob != logprob, 1, 0) + tl.where((request.flags & LOGPROB) != 0, 2, 0)
    status += tl.load(request.parameters + ALTERNATIVES) * 256
    result = batch.results + row.index * batch.result_stride
    tl.store(result, token)
    tl.store(result + 1, bits(logprob))
    tl.store(result + 2, bits(x - raw_log_z))
    tl.store(result + 3, status)
    tl.store(tables.last_tokens + request.slot, token)
    if (tables.words is not None) and (tables.drafted is None):
        if (request.flags & EDITED) != 0:
            word = tables.words + tl.load(request.parameters + EDIT_ROW).to(tl.int64) * tables.vocab + token
            tl.store(word, tl.load(word) + 1)


@triton.jit
def store_winner(token, block, row, BLOCKS: tl.constexpr):
    """Leaves the winner of a block to the last program of the row."""
    tl.store(row.partial + WINNER * BLOCKS + block, token.to(tl.float32, bitcast=True))


@triton.jit
def load_winners(row, block, considered, request, tables, BLOCKS: tl.constexpr):
    """The winners of all blocks [BLOCKS], and their final logits, -inf where there is none."""
    place = row.partial + WINNER * BLOCKS + block
    tokens = tl.load(place, mask=considered, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
    considered = considered & (tokens < tables.vocab)
    raw = tl.load(request.logits + tokens, mask=considered, other=float("-inf")).to(tl.float32)
    return tokens, tl.where(considered, edited_logits(raw, tokens, considered, request, tables), float("-inf"))


@triton.jit
def winner_of(races, tokens, considered):
    """The token of the largest race; of equal ones the first."""
    races = tl.where(considered, races, float("-inf"))
    return first_of(considered & (races == tl.max(races, axis=0)), tokens)
