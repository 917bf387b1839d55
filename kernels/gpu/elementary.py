"""Elementary functions, as near to exact as the model's dtype can tell."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_root(x):
    """1 / √x for x > 0, float32. One step of Newton's method behind the hardware's estimate halves its error of 2⁻²³:
    a norm's result is a factor of all that follows, and where a sum has nearly cancelled that shows."""
    estimate = tl.rsqrt(x)
    return estimate + 0.5 * estimate * (1.0 - x * estimate * estimate)


@triton.jit
def silu(x, DTYPE: tl.constexpr):
    """x / (1 + e⁻ˣ), float32.

    DTYPE is what the result becomes. The hardware's exponential and quotient are some 2⁻²² off, which rounding to 16
    bits hides. A float32 model has sums that nearly cancel and show it a thousand times larger: there the exponent's
    rounding is made up for, and the quotient gets one step of Newton's method.
    """
    if DTYPE == tl.float32:  # noqa: SIM300
        # log₂ e is 1.4426950216293335 as float32, and this lacks 1.92596299e-8.
        exponent = x * -1.4426950216293335
        lost = tl.fma(x, tl.full(x.shape, -1.4426950216293335, tl.float32), -exponent) - x * 1.92596299e-8
        lost = tl.where(tl.abs(exponent) < 128.0, lost, 0.0)
        below = 1.0 + tl.exp2(exponent) * (1.0 + lost * 0.6931471805599453)
        inverse = 1.0 / below
        more = inverse * tl.fma(-below, inverse, tl.full(x.shape, 1.0, tl.float32))
        return x * (inverse + tl.where(below < float("inf"), more, 0.0))
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return x / (1.0 + tl.exp(-x))
