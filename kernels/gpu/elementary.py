"""Elementary functions, as near to exact as the model's dtype can tell."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def inverse_root(x):
    """1 / √x for x > 0, float32. One step of Newton's method behind the hardware's estimate halves its error of 2⁻²³:
    a norm's result is a factor of all that follows, and where a sum has nearly cancelled that shows."""
    estimate = tl.rsqrt(x)
    return estimate + 0.5 * estimate * (1.0 - x * estimate * estimate)


@triton.jit
def exponential(x):
    """eˣ, float32, within two ulp. The hardware has 2ʸ, and rounding y = x log₂ e alone costs |x| / 2 ulp: so
    eˣ = 2ⁿ 2ʸ with n = round(x log₂ e) and y = (x − n ln 2) log₂ e, where n times ln 2's first 15 bits is exact (Cody
    and Waite, Software Manual for the Elementary Functions, 1980)."""
    x = tl.where(x < -150.0, -150.0, tl.where(x > 130.0, 130.0, x))
    n = tl.minimum(tl.floor(x * 1.4426950408889634 + 0.5), 127.0)
    rest = (x - n * 0.693145751953125) - n * 1.42860682030941723e-6
    return tl.exp2(n) * tl.exp2(rest * 1.4426950408889634)


@triton.jit
def exponential_for(x, DTYPE: tl.constexpr):
    """eˣ, float32, as near as a model of DTYPE can tell: vectors of it cost registers."""
    if DTYPE == tl.float32:  # noqa: SIM300
        return exponential(x)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.exp(x)


@triton.jit
def softplus(x):
    """log(1 + eˣ), float32, within a few ulp: max(x, 0) + 2 artanh(e / (2 + e)) with e = exp(−|x|). The hardware's
    logarithm is 2⁻²² off near 1, which for x = −7 are 3e-4 of the result: of a decay that many tokens multiply."""
    e = exponential(-tl.abs(x))
    s = e / (2.0 + e)
    squared = s * s  # at most 1/9
    series = 1.0 / 13.0 + squared * (1.0 / 15.0)
    series = 1.0 / 11.0 + squared * series
    series = 1.0 / 9.0 + squared * series
    series = 1.0 / 7.0 + squared * series
    series = 1.0 / 5.0 + squared * series
    series = 1.0 / 3.0 + squared * series
    return tl.maximum(x, 0.0) + 2.0 * (s + s * (squared * series))


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ), float32, within an ulp or two; the quotient gets one step of Newton's method."""
    below = 1.0 + exponential(-x)
    inverse = 1.0 / below
    more = inverse * (1.0 - below * inverse)
    return inverse + tl.where(below < float("inf"), more, 0.0)


@triton.jit
def sigmoid_for(x, DTYPE: tl.constexpr):
    """1 / (1 + e⁻ˣ), float32, as near as a model of DTYPE can tell.

    The hardware's exponential and quotient are some 2⁻²² off, which rounding to 16 bits hides. A float32 model has sums
    that nearly cancel and show it a thousand times larger.
    """
    if DTYPE == tl.float32:  # noqa: SIM300
        return sigmoid(x)
    elif INTERPRETED:  # noqa: RET505 (Triton compiles what follows a return)
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        # A quotient and an exponential that provide for denormals are ten instructions, this is four.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def silu(x, DTYPE: tl.constexpr):
    """x / (1 + e⁻ˣ), float32; DTYPE is what the result becomes."""
    return x * sigmoid_for(x, DTYPE)
