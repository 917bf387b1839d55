"""The short way for rows with top_p alone: race among all tokens, then ask whether the winner is in the nucleus.

A token is in it if the mass of all more likely ones is below top_p, which takes one pass and no search. The winner is
one with probability top_p; if not, the race among the more likely ones is held, and asked again. What is left after
two rounds goes the long way of `sampling_select`, whose answer is the same.
"""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.rows import is_last, race, race_winner, row_keys, uniform
from kernels.gpu.sampling.state import (
    ABOVE,
    ACTIVE,
    BEST,
    CANDIDATE,
    CANDIDATE_LOGIT,
    CHECK,
    FINISHED,
    FLOOR,
    LOG_Z,
    PHASE,
    RACE_AGAIN,
    RAW_LOG_Z,
    ROW_BEST,
    SELECT_MASS,
    TARGET,
    final_logit,
    finish,
    load_final,
    load_request,
    load_winners,
    open_row,
    store_winner,
    winner_of,
)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def check_kernel(batch, tables, LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (block, row): the mass above the row's candidate; the row's last program takes or refuses it."""
    block = tl.program_id(0)
    row = open_row(tables, 1, BLOCKS, PDL)
    if tl.load(row.integers + PHASE) != CHECK:
        return
    candidate = tl.load(row.floats + CANDIDATE_LOGIT)
    if (tl.load(row.partial + BEST * BLOCKS + block) > candidate) == 0:
        return
    request = load_request(row, batch, tables)
    _, _, final = load_final(request, block, tables, BLOCK)
    row_best = tl.load(row.floats + ROW_BEST)
    mass = (tl.exp(final - row_best) * tables.mass_scale).to(tl.int64)
    tl.atomic_add(row.integers + ABOVE, tl.sum(tl.where(final > candidate, mass, 0), axis=0), sem="relaxed")
    if not is_last(row.ticket, tl.load(row.integers + ACTIVE).to(tl.int32)):
        return
    above = tl.load(row.integers + ABOVE, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(row.integers + ABOVE, 0)
    if above < tl.load(row.integers + TARGET):
        tl.store(row.integers + PHASE, FINISHED)
        token = tl.load(row.integers + CANDIDATE).to(tl.int32)
        finish(token, row, request, tl.load(row.floats + LOG_Z), tl.load(row.floats + RAW_LOG_Z), batch, tables)
        return
    if LAST:
        # The threshold is above the candidate.
        floor = row_best - candidate
        index = tl.arange(0, BLOCKS)
        bests = tl.load(row.partial + BEST * BLOCKS + index)
        near = (index * BLOCK < tables.vocab) & (row_best - bests <= floor)
        tl.store(row.floats + FLOOR, floor)
        tl.store(row.integers + ACTIVE, tl.sum(tl.where(near, 1, 0), axis=0))
        tl.store(row.integers + PHASE, SELECT_MASS)
    else:
        tl.store(row.integers + PHASE, RACE_AGAIN)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def again_kernel(batch, tables, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (block, row): the race among the tokens more likely than the refused candidate."""
    block = tl.program_id(0)
    row = open_row(tables, 1, BLOCKS, PDL)
    if tl.load(row.integers + PHASE) != RACE_AGAIN:
        return
    refused = tl.load(row.floats + CANDIDATE_LOGIT)
    if (tl.load(row.partial + BEST * BLOCKS + block) > refused) == 0:
        return
    request = load_request(row, batch, tables)
    column, inside, final = load_final(request, block, tables, BLOCK)
    keys = row_keys(request)
    row_best = tl.load(row.floats + ROW_BEST)
    winner = race_winner(tl.exp(final - row_best), block, column, inside & (final > refused), keys, BLOCK)
    store_winner(winner, block, row, BLOCKS)
    if not is_last(row.ticket, tl.load(row.integers + ACTIVE).to(tl.int32)):
        return
    index = tl.arange(0, BLOCKS)
    bests = tl.load(row.partial + BEST * BLOCKS + index)
    present = index * BLOCK < tables.vocab
    considered = present & (bests > refused)
    tokens, logits = load_winners(row, index, considered, request, tables, BLOCKS)
    races = race(tl.exp(logits - row_best), uniform(tokens, keys))
    token = tl.minimum(winner_of(races, tokens, considered), tables.vocab - 1)
    candidate = final_logit(request, token, tables)
    active = tl.sum(tl.where(present & (bests > candidate), 1, 0), axis=0)
    tl.store(row.integers + CANDIDATE, token)
    tl.store(row.integers + ACTIVE, active)
    tl.store(row.floats + CANDIDATE_LOGIT, candidate)
    if active == 0:
        # Nothing is more likely, so the mass above is none.
        tl.store(row.integers + PHASE, FINISHED)
        finish(token, row, request, tl.load(row.floats + LOG_Z), tl.load(row.floats + RAW_LOG_Z), batch, tables)
    else:
        tl.store(row.integers + PHASE, CHECK)
