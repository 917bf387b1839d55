"""The first sampling kernel: sums, rows without filters, and bounds for those with filters."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.sampling_rows import (
    BINS,
    EDITED,
    FILTERED,
    FLAGS,
    GREEDY,
    LOG_MIN_P,
    LOGPROB,
    NUCLEUS,
    PARAMETERS,
    TOP_K,
    TOP_P,
    edited_logits,
    float_parameter,
    heated,
    is_last,
    race,
    row_keys,
)
from kernels.gpu.sampling_state import (
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
    FLOATS,
    FLOOR,
    HEATED_SUM,
    INTEGERS,
    LEVEL,
    LOG_Z,
    LOWEST,
    PARTIALS,
    PHASE,
    RACE,
    RAW_LOG_Z,
    RAW_MAX,
    RAW_SUM,
    ROW_BEST,
    SELECT_COUNT,
    SELECT_MASS,
    SELECTED,
    TARGET,
    best_token,
    block_race,
    finish,
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


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["step", "results"])
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
    final = heated(raw, parameters)
    weights = tl.exp(final - tl.where(top == float("-inf"), 0.0, top))
    heated_sum = tl.sum(weights, axis=0)
    tl.store(partial + RAW_MAX * BLOCKS + block, raw_max)
    tl.store(partial + HEATED_SUM * BLOCKS + block, heated_sum)
    if (flags & LOGPROB) != 0:
        zero = tl.where(raw_max == float("-inf"), 0.0, raw_max)
        tl.store(partial + RAW_SUM * BLOCKS + block, tl.sum(tl.exp(raw - zero), axis=0))
    best = top
    best_sum = heated_sum
    if EDITS:
        if (flags & EDITED) != 0:
            final = edited_logits(
                raw, column, inside, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES
            )
            best = tl.max(final, axis=0)
            weights = tl.exp(final - tl.where(best == float("-inf"), 0.0, best))
            best_sum = tl.sum(weights, axis=0)
    tl.store(partial + BEST * BLOCKS + block, best)
    tl.store(partial + BEST_SUM * BLOCKS + block, best_sum)
    if (flags & GREEDY) != 0:
        tl.store(partial + RACE * BLOCKS + block, block_race(final, column, inside, partial, block, BLOCKS))
    elif ((flags & FILTERED) == 0) | ((flags & NUCLEUS) != 0):
        key_low, key_high = row_keys(parameters, output_count)
        values = race(weights, column, key_low, key_high)
        winner = block_race(values, column, inside, partial, block, BLOCKS)
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
    token = tl.full((), 0, tl.int32)
    raced = ((flags & FILTERED) == 0) | ((flags & NUCLEUS) != 0)
    if raced:
        token = tl.minimum(best_token(partial, index, present, BLOCKS), vocab - 1)
    # Of rows with top_p alone: the winner of all, which is in the nucleus if little is above it.
    candidate = row_best
    if (flags & NUCLEUS) != 0:
        x = tl.load(logits + token).to(tl.float32)
        candidate = edited_logits(
            x, token, token >= 0, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES
        )
    blocks_above = tl.sum(tl.where(present & (bests > candidate), 1, 0), axis=0)
    if (regular == 0) | (raced & (blocks_above == 0)) | ((flags & FILTERED) == 0):
        tl.store(integers + PHASE, FINISHED)
        finish(
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
    if (flags & NUCLEUS) != 0:
        phase = tl.full((), CHECK, tl.int32)
        active = blocks_above
        tl.store(integers + CANDIDATE, token)
        tl.store(floats + CANDIDATE_LOGIT, candidate)
    elif phase == SELECTED:
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
    tl.store(integers + CUT_LOW, EVERYTHING_LOW)
