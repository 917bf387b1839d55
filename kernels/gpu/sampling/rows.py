"""Parts that the sampling kernels share: the table of a row's parameters, edits of logits, noise, and distance bins.

References: services/engine/executors/cpu/sampling_params.py (edits) and services/engine/executors/rng.py (noise).
"""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803, SIM102
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.elementary import INTERPRETED

PARAMETERS = tl.constexpr(32)
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
MOST_OUTPUT = tl.constexpr(13)
"""Output tokens at which the request ends, for `kernels.gpu.sampling.draft_tokens`."""
STOPS = tl.constexpr(16)
"""First of the words with the request's stop tokens, -1 where there are fewer; for the same."""
MOST_STOPS = tl.constexpr(16)
MOST_DRAFTS = tl.constexpr(4)
"""Most draft tokens of a slot."""

GREEDY = tl.constexpr(1)
FILTERED = tl.constexpr(2)
EDITED = tl.constexpr(4)
"""The request has a row of token words: penalties, min_tokens or logit_bias."""
BIASED = tl.constexpr(8)
LOGPROB = tl.constexpr(16)
"""The request wants log-probabilities of the raw distribution."""

NUCLEUS = tl.constexpr(32)
"""top_p is the only filter of the request."""
FORCED = tl.constexpr(64)
"""The request brings its tokens: that of the step is taken where another would be drawn."""

NO_TOKEN = tl.constexpr(2147483647)
FIRST_BLOCK = tl.constexpr(-(1 << 31))
"""rng.FIRST_BLOCK."""

COUNT_MASK = tl.constexpr((1 << 24) - 1)
"""Bits of a token word that count how often the token was generated."""
IN_PROMPT = tl.constexpr(1 << 24)
MASKED_EARLY = tl.constexpr(1 << 25)
"""The token may not come before min_tokens."""

BINS = tl.constexpr(2048)
"""Bins of one histogram level. Three levels resolve a distance of logits to 2**-28."""
FIRST_LEVEL = tl.constexpr(64.0)
"""Bins of the first level a unit of logits: 2048 of them reach down to exp(-32) of the most likely token, below which
tokens count as equal (a row of a million such tokens has a probability of 1e-8)."""


@triton.jit
def float_parameter(parameters, index: tl.constexpr):
    """A float of the parameter row."""
    return tl.load(parameters + index).to(tl.float32, bitcast=True)


@triton.jit
def edited_logits(x, column, inside, request, tables):
    """Raw logits [BLOCK] to the final ones: the mask, logit_bias, min_tokens, penalties (OpenAI; CTRL), then
    temperature. What is masked stays -inf through all of them."""
    if tables.masks is not None:
        if request.mask >= 0:
            words = tables.masks + request.mask.to(tl.int64) * ((tables.vocab + 31) // 32)
            word = tl.load(words + column // 32, mask=inside, other=0)
            x = tl.where(((word >> (column % 32)) & 1) != 0, x, float("-inf"))
    if tables.words is not None:
        if (request.flags & EDITED) != 0:
            row = tl.load(request.parameters + EDIT_ROW).to(tl.int64) * tables.vocab
            if tables.biases is not None:
                if (request.flags & BIASED) != 0:
                    x += tl.load(tables.biases + row + column, mask=inside, other=0.0)
            word = tl.load(tables.words + row + column, mask=inside, other=0)
            generated = word & COUNT_MASK
            if tables.drafted is not None:
                for place in tl.static_range(MOST_DRAFTS):
                    draft = tl.load(tables.drafted + request.row * MOST_DRAFTS + place)
                    generated += (column == draft).to(tl.int32)
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
    """The two 32-bit keys of rng.row_keys (splitmix64) for the row's seed and counter."""
    low = tl.load(request.parameters + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(request.parameters + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = (high << 32) | low
    mixed = _mix(_mix(seed + gamma) + (request.output_count.to(tl.uint64) + 1) * gamma)
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def uniform(column, keys):
    """The draw of rng.exponential for each token before its logarithm: float32 in [2**-32, 1 - 2**-24]."""
    key_low, key_high = keys
    x = column.to(tl.uint32) * 0x9E3779B1 + key_low
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= key_high
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    x &= 0x7FFFFFFF
    u = x.to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2**-31, 2**-32
    return tl.minimum(u, 1.0 - 5.960464477539063e-08)  # 1 - 2**-24


@triton.jit
def race(weight, u):
    """``weight / E`` with E = -log(1 - u) ~ Exp(1) for each token: its argmax is a sample.

    log(weight / E) is the reference's ``logit - log E`` up to a constant of the row; the order is the same but for
    pairs that are equal to the resolution of float32 (some 1e-6 of a logit).
    """
    # E = -log1p(-u) = log(w) u / (w - 1) with w = 1 - u rounded: the rounding errors of w cancel (W. Kahan).
    w = 1.0 - u
    tiny = w == 1.0
    numerator = tl.where(tiny, weight, weight * (w - 1.0))
    denominator = tl.where(tiny, u, tl.log(w) * u)
    return numerator / denominator


@triton.jit
def race_estimate(weight, u):
    """`race` to within its 2**-11th part, at a quarter of the cost.

    Below 2**-10, E = u + u²/2 up to its u²/3rd part; above, lg2.approx is wrong by 2**-22 at most (PTX manual), and E
    is not below 2**-10.
    """
    if INTERPRETED:
        e = tl.where(u < 0.0009765625, u + 0.5 * u * u, tl.log2(1.0 - u) * -0.6931471824645996)
        return weight / e
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.inline_asm_elementwise(
            """{ .reg .f32 e, s; .reg .pred p; sub.f32 e, 0f3F800000, $2; lg2.approx.ftz.f32 e, e;
            mul.f32 e, e, 0fBF317218; mul.f32 s, $2, 0f3F000000; fma.rn.f32 s, s, $2, $2;
            setp.lt.f32 p, $2, 0f3A800000; selp.f32 e, s, e, p; rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }""",
            "=f,f,f", [weight, u], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def race_winner(weight, block, column, allowed, keys, BLOCK: tl.constexpr):
    """The token of a block [BLOCK] that wins its race, of equal ones the first; NO_TOKEN if all are NaN.

    Estimates decide, unless a second token comes so near that they cannot: then all are computed exactly, in a few
    blocks of a thousand.
    """
    tl.static_assert(BLOCK <= 32768)
    u = uniform(column, keys)
    estimates = tl.where(allowed, race_estimate(weight, u), -1.0)
    best = tl.max(estimates, axis=0)
    # One sum says how many come near and, if it is one, which.
    near = tl.sum(tl.where(estimates >= best * (1.0 - 0.001953125), BLOCK + column % BLOCK, 0), axis=0)
    # Near 0 products are subnormal, and rounded more coarsely.
    if (near >= BLOCK) & (near < 2 * BLOCK) & (best > 1e-30):
        token = block * BLOCK + near - BLOCK
    else:
        exact = tl.where(allowed, race(weight, u), -1.0)
        token = first_of(allowed & (exact == tl.max(exact, axis=0)), column)
    return token


@triton.jit
def first_of(chosen, tokens):
    """The smallest token that is chosen; NO_TOKEN if none is."""
    return tl.min(tl.where(chosen, tokens, NO_TOKEN), axis=0)


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
    """True if a token passes the filters of its row: at most as far from the best as the cut, and min_p."""
    first, second, third = distance_bins(logits, best)
    low = second * BINS + third
    return ((first < cut_high) | ((first == cut_high) & (low <= cut_low))) & (logits >= lowest)


@triton.jit
def is_last(ticket, programs):
    """True if this program is the last of ``programs`` to get here; all that the others wrote is then visible.

    The last one puts the ticket back to 0.
    """
    tl.debug_barrier()
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket, 0)
    return last
