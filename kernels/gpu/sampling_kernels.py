"""The kernels behind `kernels.gpu.sampling`; its docstring explains how they work together."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.sampling_rows import (
    ALTERNATIVES,
    BINS,
    EDIT_ROW,
    EDITED,
    FILTERED,
    FLAGS,
    GREEDY,
    LOG_MIN_P,
    LOGPROB,
    PARAMETERS,
    TOP_K,
    TOP_P,
    allowed,
    distance_bins,
    edited_logits,
    float_parameter,
    heated,
    is_last,
    race,
    row_keys,
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
INTEGERS = tl.constexpr(16)

FINISHED = tl.constexpr(0)
SELECT_COUNT = tl.constexpr(1)
"""Looking for the top_k-th logit."""
SELECT_MASS = tl.constexpr(2)
"""Looking for the logit at which the mass reaches top_p."""
SELECTED = tl.constexpr(3)

RESULT_WORDS = tl.constexpr(4)
"""token, bits of sampling_logprob, bits of logprob, flags (1: error, 2: has logprob, from bit 8 on: alternatives)."""
MOST_ALTERNATIVES = tl.constexpr(20)
_EVERYTHING_LOW = tl.constexpr(2048 * 2048 - 1)


@triton.jit
def _bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _finish(token, logits, parameters, flags, log_z, raw_log_z, words, vocab, last_token, result, EDITS: tl.constexpr):
    """Writes the row's token, its log-probabilities and the books that the next step reads."""
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    x = tl.load(logits + token).to(tl.float32)
    logprob = heated(x, parameters) - log_z
    status = tl.where(logprob != logprob, 1, 0) + tl.where((flags & LOGPROB) != 0, 2, 0)
    status += tl.load(parameters + ALTERNATIVES) * 256
    tl.store(result, token)
    tl.store(result + 1, _bits(logprob))
    tl.store(result + 2, _bits(x - raw_log_z))
    tl.store(result + 3, status)
    tl.store(last_token, token)
    if EDITS:
        if (flags & EDITED) != 0:
            word = words + tl.load(parameters + EDIT_ROW).to(tl.int64) * vocab + token
            tl.store(word, tl.load(word) + 1)


@triton.jit
def _best_token(partial, block, considered, BLOCKS: tl.constexpr):
    """The token of the largest race; of equal ones the first."""
    races = tl.load(partial + RACE * BLOCKS + block, mask=considered, other=float("-inf"), cache_modifier=".cg")
    tokens = tl.load(partial + RACE_TOKEN * BLOCKS + block, mask=considered, other=0.0, cache_modifier=".cg")
    tokens = tokens.to(tl.int32, bitcast=True)
    winners = considered & (races == tl.max(races, axis=0))
    return tl.min(tl.where(winners, tokens, 2147483647), axis=0)


@triton.jit
def _block_race(values, column, inside, partial, block, BLOCKS: tl.constexpr):
    """Stores the winner of a block."""
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(inside & (values == best), column, 2147483647), axis=0)
    tl.store(partial + RACE_TOKEN * BLOCKS + block, token.to(tl.float32, bitcast=True))
    return best


@triton.jit
def _log_sum(largest, sums):
    """log of the sum over blocks; NaN if a logit is NaN or +inf, or all are -inf (as the reference's log softmax)."""
    top = tl.max(largest, axis=0)
    return top + tl.log(tl.sum(sums * tl.exp(largest - top), axis=0))


@triton.jit
def _kth_bound(best, present, k):
    """A lower bound of the k-th largest logit of a row: of the k-th largest of its blocks' best, the upper 20 bits.

    -inf if there are fewer blocks. Ordered integers of floats: Herf, Radix Tricks, 2001.
    """
    pattern = best.to(tl.int32, bitcast=True)
    ordered = tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).to(tl.int64) + 2147483648
    ordered = tl.where(present, ordered, -1)
    bound = tl.full((), 0, tl.int64)
    for step in range(20):
        bit = tl.full((), 1, tl.int64) << (31 - step)
        enough = tl.sum(tl.where(ordered >= bound + bit, 1, 0), axis=0) >= k
        bound += tl.where(enough, bit, 0)
    pattern = (bound - 2147483648).to(tl.int32)
    value = tl.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).to(tl.float32, bitcast=True)
    # A truncated pattern can be that of a NaN below -inf.
    return tl.where((bound > 0) & (value == value), value, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def scan_kernel(
    logits,
    step,
    table,
    words,
    biases,
    partials,
    floats,
    integers,
    tickets,
    last_tokens,
    results,
    rows,
    vocab,
    blocks,
    logits_stride,
    result_stride,
    mass_scale,
    EDITS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, row): sums of one block, and the race of rows without filters. The row's last program finishes
    such rows, and prepares the selection of the others."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(step + row)
    integers += row * INTEGERS
    if slot <= 0:
        if block == 0:
            tl.store(integers + PHASE, 0)
        return
    output_count = tl.load(step + rows + row)
    parameters = table + slot * PARAMETERS
    flags = tl.load(parameters + FLAGS)
    partial = partials + row * PARTIALS * BLOCKS
    logits += row * logits_stride
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    raw_max = tl.max(raw, axis=0)
    top = heated(raw_max, parameters)
    # A block may be all -inf although its row is not.
    weights = tl.exp(heated(raw, parameters) - tl.where(top == float("-inf"), 0.0, top))
    heated_sum = tl.sum(weights, axis=0)
    tl.store(partial + RAW_MAX * BLOCKS + block, raw_max)
    tl.store(partial + HEATED_SUM * BLOCKS + block, heated_sum)
    if (flags & LOGPROB) != 0:
        zero = tl.where(raw_max == float("-inf"), 0.0, raw_max)
        tl.store(partial + RAW_SUM * BLOCKS + block, tl.sum(tl.exp(raw - zero), axis=0))
    final = edited_logits(raw, column, inside, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES)
    best = top
    best_sum = heated_sum
    if EDITS:
        if (flags & EDITED) != 0:
            best = tl.max(final, axis=0)
            weights = tl.exp(final - tl.where(best == float("-inf"), 0.0, best))
            best_sum = tl.sum(weights, axis=0)
    tl.store(partial + BEST * BLOCKS + block, best)
    tl.store(partial + BEST_SUM * BLOCKS + block, best_sum)
    if (flags & GREEDY) != 0:
        tl.store(partial + RACE * BLOCKS + block, _block_race(final, column, inside, partial, block, BLOCKS))
    elif (flags & FILTERED) == 0:
        key_low, key_high = row_keys(parameters, output_count)
        values = race(weights, column, key_low, key_high)
        winner = _block_race(values, column, inside, partial, block, BLOCKS)
        # Comparable between blocks, whose weights are relative to their own best.
        tl.store(partial + RACE * BLOCKS + block, tl.where(winner > 0, best + tl.log(winner), float("-inf")))
    if not is_last(tickets + row, blocks):
        return

    index = tl.arange(0, BLOCKS)
    present = index < blocks
    floats += row * FLOATS
    none = float("-inf")
    raw_maxima = tl.load(partial + RAW_MAX * BLOCKS + index, mask=present, other=none, cache_modifier=".cg")
    sums = tl.load(partial + HEATED_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
    log_z = _log_sum(heated(raw_maxima, parameters), sums)
    raw_log_z = log_z
    if (flags & LOGPROB) != 0:
        sums = tl.load(partial + RAW_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
        raw_log_z = _log_sum(raw_maxima, sums)
    tl.store(floats + LOG_Z, log_z)
    tl.store(floats + RAW_LOG_Z, raw_log_z)
    bests = tl.load(partial + BEST * BLOCKS + index, mask=present, other=none, cache_modifier=".cg")
    row_best = tl.max(bests, axis=0)
    # NaN anywhere, or every token masked: there is nothing to select from.
    regular = (log_z == log_z) & (row_best > none) & (row_best < float("inf"))
    if ((flags & FILTERED) == 0) | (regular == 0):
        tl.store(integers + PHASE, FINISHED)
        token = tl.full((), 0, tl.int32)
        if (flags & FILTERED) == 0:
            token = _best_token(partial, index, present, BLOCKS)
        _finish(
            token,
            logits,
            parameters,
            flags,
            log_z,
            raw_log_z,
            words,
            vocab,
            last_tokens + slot,
            results + row * result_stride,
            EDITS,
        )
        return

    top_k = tl.load(parameters + TOP_K)
    top_p = float_parameter(parameters, TOP_P)
    log_min_p = float_parameter(parameters, LOG_MIN_P)
    lowest = row_best + log_min_p
    phase = tl.where(top_k > 0, SELECT_COUNT, tl.where(top_p < 1.0, SELECT_MASS, SELECTED))
    target = tl.full((), 0, tl.int64)
    floor = row_best - lowest
    if phase == SELECT_COUNT:
        floor = tl.minimum(floor, row_best - _kth_bound(bests, present, top_k))
    if (phase == SELECT_MASS) & (log_min_p == none):
        # All tokens of probability below (1 - top_p) / V together weigh less than 1 - top_p: none is needed.
        sums = tl.load(partial + BEST_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
        mass = tl.sum((sums * tl.exp(bests - row_best)).to(tl.float64), axis=0)
        target = tl.maximum((mass * top_p.to(tl.float64) * mass_scale).to(tl.int64), 1)
        floor = 0.01 - tl.log(mass.to(tl.float32) * (1.0 - top_p) / vocab)
    if phase == SELECTED:
        active = tl.sum(tl.where(present & (bests >= lowest), 1, 0), axis=0)
    else:
        active = tl.sum(tl.where(present & (row_best - bests <= floor), 1, 0), axis=0)
    tl.store(floats + ROW_BEST, row_best)
    tl.store(floats + LOWEST, lowest)
    tl.store(floats + FLOOR, floor)
    tl.store(integers + PHASE, phase)
    tl.store(integers + LEVEL, 1)
    tl.store(integers + ACTIVE, active)
    tl.store(integers + BASE_COUNT, 0)
    tl.store(integers + BASE_MASS, 0)
    tl.store(integers + TARGET, target)
    tl.store(integers + CUT_HIGH, BINS - 1)
    tl.store(integers + CUT_LOW, _EVERYTHING_LOW)


@triton.jit
def _crossing(values, base, target):
    """The first bin at which base + the running sum reaches the target; BINS if none does."""
    bins = tl.arange(0, BINS)
    reached = base + tl.cumsum(values, axis=0) >= target
    return tl.min(tl.where(reached, bins, BINS), axis=0)


@triton.jit(do_not_specialize=["rows"])
def select_kernel(
    logits,
    step,
    table,
    words,
    biases,
    partials,
    floats,
    integers,
    tickets,
    masses,
    counts,
    rows,
    vocab,
    logits_stride,
    mass_scale,
    EDITS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, row): adds one block to the histogram of the row's present level. The row's last program finds
    the bin in which the threshold lies, which the next level divides further."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    integers += row * INTEGERS
    phase = tl.load(integers + PHASE).to(tl.int32)
    if (phase != SELECT_COUNT) & (phase != SELECT_MASS):
        return
    floats += row * FLOATS
    row_best = tl.load(floats + ROW_BEST)
    floor = tl.load(floats + FLOOR)
    partial = partials + row * PARTIALS * BLOCKS
    if (row_best - tl.load(partial + BEST * BLOCKS + block) <= floor) == 0:
        return
    slot = tl.load(step + row)
    output_count = tl.load(step + rows + row)
    parameters = table + slot * PARAMETERS
    flags = tl.load(parameters + FLAGS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    raw = tl.load(logits + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    final = edited_logits(raw, column, inside, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES)
    level = tl.load(integers + LEVEL).to(tl.int32)
    prefix_high = tl.load(integers + PREFIX_HIGH).to(tl.int32)
    prefix_low = tl.load(integers + PREFIX_LOW).to(tl.int32)
    first, second, third = distance_bins(final, row_best)
    chosen = inside & (row_best - final <= floor) & (final >= tl.load(floats + LOWEST))
    chosen = chosen & ((level == 1) | (first == prefix_high)) & ((level < 3) | (second == prefix_low))
    bin_of = tl.where(level == 1, first, tl.where(level == 2, second, third))
    region = row * 2 * BINS
    if level > 1:
        region += BINS
    # Integers add up to the same sum in any order.
    mass = (tl.exp(final - row_best) * mass_scale).to(tl.int64)
    tl.atomic_add(masses + region + bin_of, mass, mask=chosen, sem="relaxed")
    if phase == SELECT_COUNT:
        tl.atomic_add(counts + region + bin_of, tl.full(bin_of.shape, 1, tl.int32), mask=chosen, sem="relaxed")
    if not is_last(tickets + row, tl.load(integers + ACTIVE).to(tl.int32)):
        return

    bins = tl.arange(0, BINS)
    top_p = float_parameter(parameters, TOP_P)
    mass = tl.load(masses + region + bins, cache_modifier=".cg")
    base_mass = tl.load(integers + BASE_MASS)
    target = tl.load(integers + TARGET)
    if phase == SELECT_COUNT:
        count = tl.load(counts + region + bins, cache_modifier=".cg").to(tl.int64)
        base_count = tl.load(integers + BASE_COUNT)
        crossing = _crossing(count, base_count, tl.load(parameters + TOP_K).to(tl.int64))
        tl.store(integers + BASE_COUNT, base_count + tl.sum(tl.where(bins < crossing, count, 0), axis=0))
    else:
        if target == 0:
            target = _share(tl.sum(mass, axis=0), top_p)
            tl.store(integers + TARGET, target)
        crossing = _crossing(mass, base_mass, target)
    above = base_mass + tl.sum(tl.where(bins < crossing, mass, 0), axis=0)
    resolved = (level == 3) | (crossing == BINS)
    nothing = tl.full((BINS,), 0, tl.int32)
    if level > 1:
        tl.debug_barrier()
        tl.store(masses + region + bins, nothing.to(tl.int64))
        tl.store(counts + region + bins, nothing)
    if resolved == 0:
        tl.store(integers + LEVEL, level + 1)
        tl.store(integers + BASE_MASS, above)
        tl.store(integers + (PREFIX_HIGH + level - 1), crossing)
        return

    cut_high = tl.where(crossing == BINS, BINS - 1, prefix_high)
    cut_low = tl.where(crossing == BINS, _EVERYTHING_LOW, prefix_low * BINS + crossing)
    first_region = row * 2 * BINS
    if (phase == SELECT_COUNT) & (top_p < 1.0):
        # The nucleus is a part of what top_k left, so the first level's histogram serves again.
        kept = above + tl.sum(tl.where(bins == crossing, mass, 0), axis=0)
        target = _share(kept, top_p)
        mass = tl.load(masses + first_region + bins, cache_modifier=".cg")
        crossing = tl.minimum(_crossing(mass, tl.full((), 0, tl.int64), target), BINS - 1)
        tl.store(integers + PHASE, SELECT_MASS)
        tl.store(integers + LEVEL, 2)
        tl.store(integers + TARGET, target)
        tl.store(integers + BASE_MASS, tl.sum(tl.where(bins < crossing, mass, 0), axis=0))
        tl.store(integers + PREFIX_HIGH, crossing)
        return
    tl.debug_barrier()
    tl.store(masses + first_region + bins, nothing.to(tl.int64))
    tl.store(counts + first_region + bins, nothing)
    index = tl.arange(0, BLOCKS)
    bests = tl.load(partial + BEST * BLOCKS + index)
    considered = (index * BLOCK < vocab) & allowed(bests, row_best, tl.load(floats + LOWEST), cut_high, cut_low)
    tl.store(integers + PHASE, SELECTED)
    tl.store(integers + ACTIVE, tl.sum(tl.where(considered, 1, 0), axis=0))
    tl.store(integers + CUT_HIGH, cut_high)
    tl.store(integers + CUT_LOW, cut_low)


@triton.jit
def _share(mass, top_p):
    """The mass that the nucleus must reach, at least that of one token."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["rows"])
def race_kernel(
    logits,
    step,
    table,
    words,
    biases,
    partials,
    floats,
    integers,
    tickets,
    last_tokens,
    results,
    rows,
    vocab,
    logits_stride,
    result_stride,
    EDITS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, row): the race among the allowed tokens of one block; the row's last program finishes it."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    integers += row * INTEGERS
    if tl.load(integers + PHASE) != SELECTED:
        return
    floats += row * FLOATS
    row_best = tl.load(floats + ROW_BEST)
    lowest = tl.load(floats + LOWEST)
    cut_high = tl.load(integers + CUT_HIGH).to(tl.int32)
    cut_low = tl.load(integers + CUT_LOW).to(tl.int32)
    partial = partials + row * PARTIALS * BLOCKS
    if allowed(tl.load(partial + BEST * BLOCKS + block), row_best, lowest, cut_high, cut_low) == 0:
        return
    slot = tl.load(step + row)
    output_count = tl.load(step + rows + row)
    parameters = table + slot * PARAMETERS
    flags = tl.load(parameters + FLAGS)
    logits += row * logits_stride
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    final = edited_logits(raw, column, inside, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES)
    key_low, key_high = row_keys(parameters, output_count)
    values = race(tl.exp(final - row_best), column, key_low, key_high)
    values = tl.where(inside & allowed(final, row_best, lowest, cut_high, cut_low), values, -1.0)
    tl.store(partial + RACE * BLOCKS + block, _block_race(values, column, inside, partial, block, BLOCKS))
    if not is_last(tickets + row, tl.load(integers + ACTIVE).to(tl.int32)):
        return
    index = tl.arange(0, BLOCKS)
    bests = tl.load(partial + BEST * BLOCKS + index)
    considered = (index * BLOCK < vocab) & allowed(bests, row_best, lowest, cut_high, cut_low)
    _finish(
        _best_token(partial, index, considered, BLOCKS),
        logits,
        parameters,
        flags,
        tl.load(floats + LOG_Z),
        tl.load(floats + RAW_LOG_Z),
        words,
        vocab,
        last_tokens + slot,
        results + row * result_stride,
        EDITS,
    )


@triton.jit
def alternatives_kernel(
    logits,
    step,
    table,
    partials,
    floats,
    results,
    vocab,
    logits_stride,
    result_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): the most likely tokens of the raw distribution, one a turn. Only the block that holds the next
    one is read: the largest of each block is known."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(step + row)
    if slot <= 0:
        return
    parameters = table + slot * PARAMETERS
    wanted = tl.load(parameters + ALTERNATIVES)
    if wanted == 0:
        return
    logits += row * logits_stride
    result = results + row * result_stride + RESULT_WORDS
    log_z = tl.load(floats + row * FLOATS + RAW_LOG_Z)
    index = tl.arange(0, BLOCKS)
    partial = partials + row * PARTIALS * BLOCKS
    none = float("-inf")
    largest = tl.load(partial + RAW_MAX * BLOCKS + index, mask=index * BLOCK < vocab, other=none)
    offset = tl.arange(0, BLOCK)
    # Of equal logits in a block, the token up to which they were taken.
    taken = tl.full((BLOCKS,), -1, tl.int32)
    for turn in range(wanted):
        value = tl.max(largest, axis=0)
        block = tl.min(tl.where(largest == value, index, BLOCKS - 1), axis=0)
        column = block * BLOCK + offset
        x = tl.load(logits + column, mask=column < vocab, other=none).to(tl.float32)
        equal = (x == value) & (column > tl.max(tl.where(index == block, taken, -1), axis=0))
        token = tl.minimum(tl.min(tl.where(equal, column, 2147483647), axis=0), vocab - 1)
        tl.store(result + turn, token)
        tl.store(result + MOST_ALTERNATIVES + turn, _bits(value - log_z))
        following = tl.max(tl.where((x < value) | (equal & (column > token)), x, none), axis=0)
        largest = tl.where(index == block, following, largest)
        taken = tl.where(index == block, tl.where(following == value, token, -1), taken)
