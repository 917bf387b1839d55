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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.sampling_rows import FLAGS, PARAMETERS, edited_logits, is_last, race, row_keys
from kernels.gpu.sampling_state import (
    ABOVE,
    ACTIVE,
    BEST,
    CANDIDATE,
    CANDIDATE_LOGIT,
    CHECK,
    FINISHED,
    FLOATS,
    FLOOR,
    INTEGERS,
    LOG_Z,
    PARTIALS,
    PHASE,
    RACE,
    RACE_AGAIN,
    RAW_LOG_Z,
    ROW_BEST,
    SELECT_MASS,
    TARGET,
    best_token,
    block_race,
    finish,
)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["step", "results"])
def check_kernel(
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
    mass_scale,
    LAST: tl.constexpr,
    EDITS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, row): the mass above the row's candidate; the row's last program takes or refuses it."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    integers += row * INTEGERS
    if tl.load(integers + PHASE) != CHECK:
        return
    floats += row * FLOATS
    candidate = tl.load(floats + CANDIDATE_LOGIT)
    partial = partials + row * PARTIALS * BLOCKS
    if (tl.load(partial + BEST * BLOCKS + block) > candidate) == 0:
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
    row_best = tl.load(floats + ROW_BEST)
    mass = (tl.exp(final - row_best) * mass_scale).to(tl.int64)
    tl.atomic_add(integers + ABOVE, tl.sum(tl.where(final > candidate, mass, 0), axis=0), sem="relaxed")
    if not is_last(tickets + row, tl.load(integers + ACTIVE).to(tl.int32)):
        return
    above = tl.load(integers + ABOVE, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(integers + ABOVE, 0)
    if above < tl.load(integers + TARGET):
        tl.store(integers + PHASE, FINISHED)
        finish(
            tl.load(integers + CANDIDATE).to(tl.int32),
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
        return
    if LAST:
        # The threshold is above the candidate.
        floor = row_best - candidate
        index = tl.arange(0, BLOCKS)
        bests = tl.load(partial + BEST * BLOCKS + index)
        near = (index * BLOCK < vocab) & (row_best - bests <= floor)
        tl.store(floats + FLOOR, floor)
        tl.store(integers + ACTIVE, tl.sum(tl.where(near, 1, 0), axis=0))
        tl.store(integers + PHASE, SELECT_MASS)
    else:
        tl.store(integers + PHASE, RACE_AGAIN)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["step", "results"])
def again_kernel(
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
    """Program (block, row): the race among the tokens more likely than the refused candidate."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    integers += row * INTEGERS
    if tl.load(integers + PHASE) != RACE_AGAIN:
        return
    floats += row * FLOATS
    refused = tl.load(floats + CANDIDATE_LOGIT)
    partial = partials + row * PARTIALS * BLOCKS
    if (tl.load(partial + BEST * BLOCKS + block) > refused) == 0:
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
    values = race(tl.exp(final - tl.load(floats + ROW_BEST)), column, key_low, key_high)
    values = tl.where(final > refused, values, -1.0)
    tl.store(partial + RACE * BLOCKS + block, block_race(values, column, inside, partial, block, BLOCKS))
    if not is_last(tickets + row, tl.load(integers + ACTIVE).to(tl.int32)):
        return
    index = tl.arange(0, BLOCKS)
    bests = tl.load(partial + BEST * BLOCKS + index)
    present = index * BLOCK < vocab
    token = tl.minimum(best_token(partial, index, present & (bests > refused), BLOCKS), vocab - 1)
    x = tl.load(logits + token).to(tl.float32)
    candidate = edited_logits(
        x, token, token >= 0, parameters, flags, output_count, words, biases, vocab, EDITS, BIASES
    )
    active = tl.sum(tl.where(present & (bests > candidate), 1, 0), axis=0)
    tl.store(integers + CANDIDATE, token)
    tl.store(integers + ACTIVE, active)
    tl.store(floats + CANDIDATE_LOGIT, candidate)
    if active == 0:
        # Nothing is more likely, so the mass above is none.
        tl.store(integers + PHASE, FINISHED)
        finish(
            token,
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
    else:
        tl.store(integers + PHASE, CHECK)
