"""What the sampling kernels leave for each other and for the host, and how a row ends."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling_rows import ALTERNATIVES, EDIT_ROW, EDITED, LOGPROB, heated

# Partial results: one float32 a block of each row.
RAW_MAX = tl.constexpr(0)
HEATED_SUM = tl.constexpr(1)
"""Sum of exp(x / temperature - the block's largest)."""
RAW_SUM = tl.constexpr(2)
BEST = tl.constexpr(3)
"""Largest final logit of the block."""
BEST_SUM = tl.constexpr(4)
"""Sum of exp(final logit - BEST)."""
RACE = tl.constexpr(5)
RACE_TOKEN = tl.constexpr(6)
"""Bits of an int32."""
PARTIALS = tl.constexpr(7)

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


@triton.jit
def bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def finish(token, logits, parameters, flags, log_z, raw_log_z, words, vocab, last_token, result, EDITS: tl.constexpr):
    """Writes the row's token, its log-probabilities and the books that the next step reads."""
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    x = tl.load(logits + token).to(tl.float32)
    logprob = heated(x, parameters) - log_z
    status = tl.where(logprob != logprob, 1, 0) + tl.where((flags & LOGPROB) != 0, 2, 0)
    status += tl.load(parameters + ALTERNATIVES) * 256
    tl.store(result, token)
    tl.store(result + 1, bits(logprob))
    tl.store(result + 2, bits(x - raw_log_z))
    tl.store(result + 3, status)
    tl.store(last_token, token)
    if EDITS:
        if (flags & EDITED) != 0:
            word = words + tl.load(parameters + EDIT_ROW).to(tl.int64) * vocab + token
            tl.store(word, tl.load(word) + 1)


@triton.jit
def best_token(partial, block, considered, BLOCKS: tl.constexpr):
    """The token of the largest race; of equal ones the first."""
    races = tl.load(partial + RACE * BLOCKS + block, mask=considered, other=float("-inf"), cache_modifier=".cg")
    tokens = tl.load(partial + RACE_TOKEN * BLOCKS + block, mask=considered, other=0.0, cache_modifier=".cg")
    tokens = tokens.to(tl.int32, bitcast=True)
    winners = considered & (races == tl.max(races, axis=0))
    return tl.min(tl.where(winners, tokens, 2147483647), axis=0)


@triton.jit
def block_race(values, column, inside, partial, block, BLOCKS: tl.constexpr):
    """Stores the winner of a block."""
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(inside & (values == best), column, 2147483647), axis=0)
    tl.store(partial + RACE_TOKEN * BLOCKS + block, token.to(tl.float32, bitcast=True))
    return best
