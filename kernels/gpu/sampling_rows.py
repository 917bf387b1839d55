"""What the sampling kernels share: the table of a row's parameters, edits of logits, noise, and distance bins.

References: services/engine/sampling_rows.py (edits) and services/engine/noise.py (noise).
"""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

PARAMETERS = tl.constexpr(16)
"""int32 words of one row of the parameter table, one row a state slot. Floats are stored as their bits."""
FLAGS = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
LOG_MIN_P = tl.constexpr(4)
REPETITION = tl.constexpr(5)
FREQUENCY = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
MIN_TOKENS = tl.constexpr(8)
EDIT_ROW = tl.constexpr(9)
SEED_LOW = tl.constexpr(10)
SEED_HIGH = tl.constexpr(11)
ALTERNATIVES = tl.constexpr(12)

GREEDY = tl.constexpr(1)
FILTERED = tl.constexpr(2)
EDITED = tl.constexpr(4)
"""The request has a row of token words: penalties, min_tokens or logit_bias."""
BIASED = tl.constexpr(8)
LOGPROB = tl.constexpr(16)
"""The request wants log-probabilities of the raw distribution."""

NUCLEUS = tl.constexpr(32)
"""top_p is the only filter of the request."""

COUNT_MASK = tl.constexpr((1 << 24) - 1)
"""Of a token word: how often the token was generated."""
IN_PROMPT = tl.constexpr(1 << 24)
MASKED_EARLY = tl.constexpr(1 << 25)
"""The token may not come before min_tokens."""

BINS = tl.constexpr(2048)
"""Of one histogram level. Three levels resolve a distance of logits to 2**-28."""
FIRST_LEVEL = tl.constexpr(64.0)
"""Bins of the first level a unit of logits: 2048 of them reach down to exp(-32) of the most likely token, below which
tokens count as equal (a row of a million such tokens has a probability of 1e-8)."""


@triton.jit
def float_parameter(parameters, index: tl.constexpr):
    """A float of the parameter row."""
    return tl.load(parameters + index).to(tl.float32, bitcast=True)


@triton.jit
def edited_logits(x, column, inside, request, tables):
    """Raw logits [BLOCK] to the final ones: logit_bias, min_tokens, penalties (OpenAI; CTRL), then temperature."""
    if tables.words is not None:
        if (request.flags & EDITED) != 0:
            row = tl.load(request.parameters + EDIT_ROW).to(tl.int64) * tables.vocab
            if tables.biases is not None:
                if (request.flags & BIASED) != 0:
                    x += tl.load(tables.biases + row + column, mask=inside, other=0.0)
            word = tl.load(tables.words + row + column, mask=inside, other=0)
            generated = word & COUNT_MASK
            early = request.output_count < tl.load(request.parameters + MIN_TOKENS)
            x = tl.where(early & ((word & MASKED_EARLY) != 0), float("-inf"), x)
            repetition = float_parameter(request.parameters, REPETITION)
            if repetition != 1.0:
                seen = (generated > 0) | ((word & IN_PROMPT) != 0)
                factor = tl.full(x.shape, 1.0, tl.float32) * repetition
                x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
            amount = generated.to(tl.float32) * float_parameter(request.parameters, FREQUENCY)
            amount += float_parameter(request.parameters, PRESENCE)
            x = tl.where(generated > 0, x - amount, x)
    return heated(x, request.parameters)


@triton.jit
def heated(x, parameters):
    """``x / temperature``, rounded as IEEE division is."""
    temperature = float_parameter(parameters, TEMPERATURE)
    if temperature != 1.0:
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)
    return x


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_keys(request):
    """The two 32-bit keys of noise.row_keys (splitmix64) for the row's seed and counter."""
    low = tl.load(request.parameters + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(request.parameters + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = (high << 32) | low
    mixed = _mix(_mix(seed + gamma) + (request.output_count.to(tl.uint64) + 1) * gamma)
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def race(weight, column, key_low, key_high):
    """``weight / E`` with the draw E ~ Exp(1) of noise.exponential for each token: its argmax is a sample.

    log(weight / E) is the reference's ``logit - log E`` up to a constant of the row; the order is the same but for
    pairs that are equal to the resolution of float32 (some 1e-6 of a logit).
    """
    x = column.to(tl.uint32) * 0x9E3779B1 + key_low
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= key_high
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    x &= 0x7FFFFFFF
    uniform = x.to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2**-31, 2**-32
    uniform = tl.minimum(uniform, 1.0 - 5.960464477539063e-08)  # 1 - 2**-24
    # E = -log1p(-u) = log(w) u / (w - 1) with w = 1 - u rounded: the rounding errors of w cancel (W. Kahan).
    w = 1.0 - uniform
    tiny = w == 1.0
    numerator = tl.where(tiny, weight, weight * (w - 1.0))
    denominator = tl.where(tiny, uniform, tl.log(w) * uniform)
    return numerator / denominator


@triton.jit
def distance_bins(logits, best):
    """``best - logit`` in units of 2**-28 as three digits of 11 bits, each [BLOCK] int32; never decreasing with the
    distance. Products and differences here are exact: only ``best - logit`` rounds."""
    steps = tl.minimum((best - logits) * FIRST_LEVEL, 2047.9999)
    first = steps.to(tl.int32)
    rest = (steps - first.to(tl.float32)) * 2048.0
    second = rest.to(tl.int32)
    third = ((rest - second.to(tl.float32)) * 2048.0).to(tl.int32)
    return first, second, third


@triton.jit
def allowed(logits, best, lowest, cut_high, cut_low):
    """Whether a token passes the filters of its row: at most as far from the best as the cut, and min_p."""
    first, second, third = distance_bins(logits, best)
    low = second * BINS + third
    return ((first < cut_high) | ((first == cut_high) & (low <= cut_low))) & (logits >= lowest)


@triton.jit
def is_last(ticket, programs):
    """Whether this program is the last of ``programs`` to get here; all that the others wrote is then visible.

    The last one puts the ticket back to 0.
    """
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket, 0)
    return last
