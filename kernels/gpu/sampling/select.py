"""The sampling kernels of rows with top_k, top_p or min_p: find the threshold, then race among what passes."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.rows import (
    BINS,
    TOP_K,
    TOP_P,
    allowed,
    distance_bins,
    float_parameter,
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
    CUT_HIGH,
    CUT_LOW,
    EVERYTHING_LOW,
    FLOOR,
    LEVEL,
    LOG_Z,
    LOWEST,
    PHASE,
    PREFIX_HIGH,
    PREFIX_LOW,
    RAW_LOG_Z,
    ROW_BEST,
    SELECT_COUNT,
    SELECT_MASS,
    SELECTED,
    TARGET,
    finish,
    load_final,
    load_request,
    load_winners,
    open_row,
    store_winner,
    winner_of,
)


@triton.jit
def _crossing(values, base, target):
    """The first bin at which base + the running sum reaches the target; BINS if none does."""
    bins = tl.arange(0, BINS)
    reached = base + tl.cumsum(values, axis=0) >= target
    return tl.min(tl.where(reached, bins, BINS), axis=0)


@triton.jit
def _share(mass, top_p):
    """The mass that the nucleus must reach, at least that of one token."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def select_kernel(batch, tables, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (block, row): adds one block to the histogram of the row's present level."""
    block = tl.program_id(0)
    row = open_row(tables, 1, BLOCKS, PDL)
    phase = tl.load(row.integers + PHASE).to(tl.int32)
    if (phase != SELECT_COUNT) & (phase != SELECT_MASS):
        return
    row_best = tl.load(row.floats + ROW_BEST)
    floor = tl.load(row.floats + FLOOR)
    if (row_best - tl.load(row.partial + BEST * BLOCKS + block) <= floor) == 0:
        return
    request = load_request(row, batch, tables)
    _, inside, final = load_final(request, block, tables, BLOCK)
    level = tl.load(row.integers + LEVEL).to(tl.int32)
    prefix_high = tl.load(row.integers + PREFIX_HIGH).to(tl.int32)
    prefix_low = tl.load(row.integers + PREFIX_LOW).to(tl.int32)
    first, second, third = distance_bins(final, row_best)
    chosen = inside & (row_best - final <= floor) & (final >= tl.load(row.floats + LOWEST))
    chosen = chosen & ((level == 1) | (first == prefix_high)) & ((level < 3) | (second == prefix_low))
    bin_of = tl.where(level == 1, first, tl.where(level == 2, second, third))
    region = row.index * 2 * BINS
    if level > 1:
        region += BINS
    # Integers add up to the same sum in any order.
    mass = (tl.exp(final - row_best) * tables.mass_scale).to(tl.int64)
    tl.atomic_add(tables.masses + region + bin_of, mass, mask=chosen, sem="relaxed")
    if phase == SELECT_COUNT:
        tl.atomic_add(tables.counts + region + bin_of, tl.full(bin_of.shape, 1, tl.int32), mask=chosen, sem="relaxed")


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def narrow_kernel(batch, tables, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (row): finds the bin of the present level in which the threshold lies, which the next level divides
    further. Not the last program of `select_kernel`, because its registers would keep the others off the processor."""
    row = open_row(tables, 0, BLOCKS, PDL)
    phase = tl.load(row.integers + PHASE).to(tl.int32)
    if (phase != SELECT_COUNT) & (phase != SELECT_MASS):
        return
    row_best = tl.load(row.floats + ROW_BEST)
    request = load_request(row, batch, tables)
    level = tl.load(row.integers + LEVEL).to(tl.int32)
    prefix_high = tl.load(row.integers + PREFIX_HIGH).to(tl.int32)
    prefix_low = tl.load(row.integers + PREFIX_LOW).to(tl.int32)
    region = row.index * 2 * BINS
    if level > 1:
        region += BINS
    bins = tl.arange(0, BINS)
    top_p = float_parameter(request.parameters, TOP_P)
    mass = tl.load(tables.masses + region + bins)
    base_mass = tl.load(row.integers + BASE_MASS)
    target = tl.load(row.integers + TARGET)
    if phase == SELECT_COUNT:
        count = tl.load(tables.counts + region + bins).to(tl.int64)
        base_count = tl.load(row.integers + BASE_COUNT)
        crossing = _crossing(count, base_count, tl.load(request.parameters + TOP_K).to(tl.int64))
        tl.store(row.integers + BASE_COUNT, base_count + tl.sum(tl.where(bins < crossing, count, 0), axis=0))
    else:
        if target == 0:
            target = _share(tl.sum(mass, axis=0), top_p)
            tl.store(row.integers + TARGET, target)
        crossing = _crossing(mass, base_mass, target)
    above = base_mass + tl.sum(tl.where(bins < crossing, mass, 0), axis=0)
    resolved = (level == 3) | (crossing == BINS)
    nothing = tl.full((BINS,), 0, tl.int32)
    if level > 1:
        tl.debug_barrier()
        tl.store(tables.masses + region + bins, nothing.to(tl.int64))
        tl.store(tables.counts + region + bins, nothing)
    if resolved == 0:
        tl.store(row.integers + LEVEL, level + 1)
        tl.store(row.integers + BASE_MASS, above)
        tl.store(row.integers + (PREFIX_HIGH + level - 1), crossing)
        return

    cut_high = tl.where(crossing == BINS, BINS - 1, prefix_high)
    cut_low = tl.where(crossing == BINS, EVERYTHING_LOW, prefix_low * BINS + crossing)
    first_region = row.index * 2 * BINS
    if (phase == SELECT_COUNT) & (top_p < 1.0):
        # The nucleus is a part of what top_k left, so the first level's histogram serves again.
        kept = above + tl.sum(tl.where(bins == crossing, mass, 0), axis=0)
        target = _share(kept, top_p)
        mass = tl.load(tables.masses + first_region + bins)
        crossing = tl.minimum(_crossing(mass, tl.full((), 0, tl.int64), target), BINS - 1)
        tl.store(row.integers + PHASE, SELECT_MASS)
        tl.store(row.integers + LEVEL, 2)
        tl.store(row.integers + TARGET, target)
        tl.store(row.integers + BASE_MASS, tl.sum(tl.where(bins < crossing, mass, 0), axis=0))
        tl.store(row.integers + PREFIX_HIGH, crossing)
        return
    tl.debug_barrier()
    tl.store(tables.masses + first_region + bins, nothing.to(tl.int64))
    tl.store(tables.counts + first_region + bins, nothing)
    index = tl.arange(0, BLOCKS)
    bests = tl.load(row.partial + BEST * BLOCKS + index)
    considered = (index * BLOCK < tables.vocab) & allowed(
        bests, row_best, tl.load(row.floats + LOWEST), cut_high, cut_low
    )
    tl.store(row.integers + PHASE, SELECTED)
    tl.store(row.integers + ACTIVE, tl.sum(tl.where(considered, 1, 0), axis=0))
    tl.store(row.integers + CUT_HIGH, cut_high)
    tl.store(row.integers + CUT_LOW, cut_low)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def race_kernel(batch, tables, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (block, row): the race among the allowed tokens of one block; the row's last program finishes it."""
    block = tl.program_id(0)
    row = open_row(tables, 1, BLOCKS, PDL)
    if tl.load(row.integers + PHASE) != SELECTED:
        return
    row_best = tl.load(row.floats + ROW_BEST)
    lowest = tl.load(row.floats + LOWEST)
    cut_high = tl.load(row.integers + CUT_HIGH).to(tl.int32)
    cut_low = tl.load(row.integers + CUT_LOW).to(tl.int32)
    if allowed(tl.load(row.partial + BEST * BLOCKS + block), row_best, lowest, cut_high, cut_low) == 0:
        return
    request = load_request(row, batch, tables)
    column, inside, final = load_final(request, block, tables, BLOCK)
    keys = row_keys(request)
    passes = inside & allowed(final, row_best, lowest, cut_high, cut_low)
    store_winner(race_winner(tl.exp(final - row_best), block, column, passes, keys, BLOCK), block, row, BLOCKS)
    if not is_last(row.ticket, tl.load(row.integers + ACTIVE).to(tl.int32)):
        return
    index = tl.arange(0, BLOCKS)
    bests = tl.load(row.partial + BEST * BLOCKS + index)
    considered = (index * BLOCK < tables.vocab) & allowed(bests, row_best, lowest, cut_high, cut_low)
    tokens, logits = load_winners(row, index, considered, request, tables, BLOCKS)
    token = winner_of(race(tl.exp(logits - row_best), uniform(tokens, keys)), tokens, considered)
    finish(token, row, request, tl.load(row.floats + LOG_Z), tl.load(row.floats + RAW_LOG_Z), batch, tables)
