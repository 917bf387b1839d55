"""The first sampling kernel: sums, rows without filters, and bounds for those with filters."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.rows import (
    BINS,
    EDITED,
    FILTERED,
    FIRST_BLOCK,
    GREEDY,
    LOG_MIN_P,
    LOGPROB,
    NO_TOKEN,
    NUCLEUS,
    TOP_K,
    TOP_P,
    edited_logits,
    first_of,
    float_parameter,
    heated,
    is_last,
    race,
    race_winner,
    row_keys,
    uniform,
)
from kernels.gpu.sampling.state import (
    ACTIVE,
    BASE_COUNT,
    BASE_MASS,
    BEST,
    BEST_SUM,
    CANDIDATE,
    CANDIDATE_LOGIT,
    CHECK,
    CUT_HIGH,
    CUT_LOW,
    EVERYTHING_LOW,
    FINISHED,
    FLOOR,
    HEATED_SUM,
    LEVEL,
    LOG_Z,
    LOWEST,
    PHASE,
    RAW_LOG_Z,
    RAW_MAX,
    RAW_SUM,
    ROW_BEST,
    SELECT_COUNT,
    SELECT_MASS,
    SELECTED,
    TARGET,
    final_logit,
    finish,
    load_block,
    load_final,
    load_winners,
    open_row,
    request_of,
    store_winner,
    winner_of,
)


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


@triton.jit
def _draw(request, keys, bests, sums, present, row_best, index, tables, BLOCK: tl.constexpr, PART: tl.constexpr):
    """A token of the whole vocabulary: a block by its mass, then one of its tokens."""
    masses = tl.where(present, sums * tl.exp(bests - row_best), 0.0)
    of_blocks = tl.where(present, race(masses, uniform(index | FIRST_BLOCK, keys)), -1.0)
    block = tl.minimum(first_of(present & (of_blocks == tl.max(of_blocks, axis=0)), index), (tables.vocab - 1) // BLOCK)
    token, highest = tl.full((), NO_TOKEN, tl.int32), tl.full((), -1.0, tl.float32)
    # In parts: held at once, they would take registers that keep other programs off the processor.
    for part in tl.range(0, BLOCK // PART):
        column, inside, final = load_final(request, block * (BLOCK // PART) + part, tables, PART)
        races = tl.where(inside, race(tl.exp(final - row_best), uniform(column, keys)), -1.0)
        top = tl.max(races, axis=0)
        token = tl.where(top > highest, first_of(inside & (races == top), column), token)
        highest = tl.maximum(highest, top)
    return token


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def scan_kernel(batch, tables, RACES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (block, row): sums of one block, and with RACES the race in it of rows with top_p alone. The row's last
    program finishes rows without filters, and prepares the selection of the others."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    row = open_row(tables, 1, BLOCKS, PDL)
    slot = tl.load(batch.step + row.index)
    if slot <= 0:
        if block == 0:
            tl.store(row.integers + PHASE, 0)
        return
    request = request_of(row, slot, batch, tables)
    column, inside, raw = load_block(request, block, tables, BLOCK)
    raw_max = tl.max(raw, axis=0)
    top = heated(raw_max, request.parameters)
    # A block may be all -inf although its row is not.
    final = heated(raw, request.parameters)
    weights = tl.exp(final - tl.where(top == float("-inf"), 0.0, top))
    heated_sum = tl.sum(weights, axis=0)
    tl.store(row.partial + RAW_MAX * BLOCKS + block, raw_max)
    tl.store(row.partial + HEATED_SUM * BLOCKS + block, heated_sum)
    if (request.flags & LOGPROB) != 0:
        zero = tl.where(raw_max == float("-inf"), 0.0, raw_max)
        tl.store(row.partial + RAW_SUM * BLOCKS + block, tl.sum(tl.exp(raw - zero), axis=0))
    best = top
    best_sum = heated_sum
    if (tables.words is not None) or (tables.masks is not None):
        if ((request.flags & EDITED) != 0) | (request.mask >= 0):
            final = edited_logits(raw, column, inside, request, tables)
            best = tl.max(final, axis=0)
            weights = tl.exp(final - tl.where(best == float("-inf"), 0.0, best))
            best_sum = tl.sum(weights, axis=0)
    tl.store(row.partial + BEST * BLOCKS + block, best)
    tl.store(row.partial + BEST_SUM * BLOCKS + block, best_sum)
    keys = row_keys(request)
    if (request.flags & GREEDY) != 0:
        store_winner(first_of(inside & (final == tl.max(final, axis=0)), column), block, row, BLOCKS)
    if RACES:
        if (request.flags & NUCLEUS) != 0:
            store_winner(race_winner(weights, block, column, inside, keys, BLOCK), block, row, BLOCKS)
    if not is_last(row.ticket, blocks):
        return

    index = tl.arange(0, BLOCKS)
    present = index < blocks
    none = float("-inf")
    raw_maxima = tl.load(row.partial + RAW_MAX * BLOCKS + index, mask=present, other=none, cache_modifier=".cg")
    sums = tl.load(row.partial + HEATED_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
    log_z = _log_sum(heated(raw_maxima, request.parameters), sums)
    raw_log_z = log_z
    if (request.flags & LOGPROB) != 0:
        sums = tl.load(row.partial + RAW_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
        raw_log_z = _log_sum(raw_maxima, sums)
    tl.store(row.floats + LOG_Z, log_z)
    tl.store(row.floats + RAW_LOG_Z, raw_log_z)
    bests = tl.load(row.partial + BEST * BLOCKS + index, mask=present, other=none, cache_modifier=".cg")
    row_best = tl.max(bests, axis=0)
    # NaN anywhere, or every token masked: there is nothing to select from.
    regular = (log_z == log_z) & (row_best > none) & (row_best < float("inf"))
    token = tl.full((), 0, tl.int32)
    raced = ((request.flags & FILTERED) == 0) | ((request.flags & NUCLEUS) != 0)
    if (request.flags & (GREEDY | NUCLEUS)) != 0:
        tokens, races = load_winners(row, index, present, request, tables, BLOCKS)
        if (request.flags & GREEDY) == 0:
            # Comparable between blocks, whose weights are relative to their own best.
            ratio = race(tl.exp(races - tl.where(bests == none, 0.0, bests)), uniform(tokens, keys))
            races = tl.where(ratio > 0, bests + tl.log(ratio), none)
        token = tl.minimum(winner_of(races, tokens, present), tables.vocab - 1)
    elif raced:
        sums = tl.load(row.partial + BEST_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
        token = tl.minimum(
            _draw(request, keys, bests, sums, present, row_best, index, tables, BLOCK, min(BLOCK, 256)),
            tables.vocab - 1,
        )
    # Of rows with top_p alone: the winner of all, which is in the nucleus if little is above it.
    candidate = row_best
    if (request.flags & NUCLEUS) != 0:
        candidate = final_logit(request, token, tables)
    blocks_above = tl.sum(tl.where(present & (bests > candidate), 1, 0), axis=0)
    if (regular == 0) | (raced & (blocks_above == 0)) | ((request.flags & FILTERED) == 0):
        tl.store(row.integers + PHASE, FINISHED)
        finish(token, row, request, log_z, raw_log_z, batch, tables)
        return

    top_k = tl.load(request.parameters + TOP_K)
    top_p = float_parameter(request.parameters, TOP_P)
    log_min_p = float_parameter(request.parameters, LOG_MIN_P)
    lowest = row_best + log_min_p
    phase = tl.where(top_k > 0, SELECT_COUNT, tl.where(top_p < 1.0, SELECT_MASS, SELECTED))
    target = tl.full((), 0, tl.int64)
    floor = row_best - lowest
    if phase == SELECT_COUNT:
        floor = tl.minimum(floor, row_best - _kth_bound(bests, present, top_k))
    if (phase == SELECT_MASS) & (log_min_p == none):
        # All tokens of probability below (1 - top_p) / V together weigh less than 1 - top_p: none is needed.
        sums = tl.load(row.partial + BEST_SUM * BLOCKS + index, mask=present, other=0.0, cache_modifier=".cg")
        mass = tl.sum((sums * tl.exp(bests - row_best)).to(tl.float64), axis=0)
        target = tl.maximum((mass * top_p.to(tl.float64) * tables.mass_scale).to(tl.int64), 1)
        floor = 0.01 - tl.log(mass.to(tl.float32) * (1.0 - top_p) / tables.vocab)
    if (request.flags & NUCLEUS) != 0:
        phase = tl.full((), CHECK, tl.int32)
        active = blocks_above
        tl.store(row.integers + CANDIDATE, token)
        tl.store(row.floats + CANDIDATE_LOGIT, candidate)
    elif phase == SELECTED:
        active = tl.sum(tl.where(present & (bests >= lowest), 1, 0), axis=0)
    else:
        active = tl.sum(tl.where(present & (row_best - bests <= floor), 1, 0), axis=0)
    tl.store(row.floats + ROW_BEST, row_best)
    tl.store(row.floats + LOWEST, lowest)
    tl.store(row.floats + FLOOR, floor)
    tl.store(row.integers + PHASE, phase)
    tl.store(row.integers + LEVEL, 1)
    tl.store(row.integers + ACTIVE, active)
    tl.store(row.integers + BASE_COUNT, 0)
    tl.store(row.integers + BASE_MASS, 0)
    tl.store(row.integers + TARGET, target)
    tl.store(row.integers + CUT_HIGH, BINS - 1)
    tl.store(row.integers + CUT_LOW, EVERYTHING_LOW)
