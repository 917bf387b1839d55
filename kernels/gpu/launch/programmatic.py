"""Programmatic dependent launch: what a kernel may do before the one ahead of it has finished.

Every kernel of a decode step first lets the next one start (`gdc_launch_dependents`), then does what needs nothing of
the kernels ahead, then waits for the one right ahead (`gdc_wait`), which has waited for its own. So a kernel may be
resident while several ahead of it still run, and the rule is: before it waits a kernel reads only what was written
before the step (weights, adapters, states and pages of earlier tokens, the step's integers) and writes nothing. The
step's first kernel is launched without, after everything that was queued before it.

Letting the next one start and starting early are two things: the first costs nothing; the second does not always pay
(kernels.gpu.linear.skinny_configs.starts_early).

The end of a kernel stands for the end of all before it if one of its programs has waited: those with nothing to do may
leave at once. A kernel that waits beside the one ahead may hold the next one back until then (`wait`).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(HOLD: tl.constexpr):  # noqa: N803 (constants of kernels are upper case)
    """Waits for the kernel ahead. HOLD: only now the one behind may start; all of its programs then find room alike."""
    gdc_wait()
    if HOLD:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers):
    """Asks L2 for the cache line at each pointer; waits for nothing. Not in the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_share(pointer, size, share, of, BULK: tl.constexpr):  # noqa: N803
    """Asks L2 for part ``share`` of ``of`` equal ones of the ``size`` bytes from a pointer on; waits for nothing. Not
    in the interpreter. BULK: with one instruction (Hopper and later), else line by line."""
    each = (size // of + 128) // 128 * 128
    length = tl.minimum(each, size - share * each)
    if length >= 16:
        base = pointer.to(tl.pointer_type(tl.int8)) + share * each
        if BULK:
            # One thread asks: each that did would ask for all of it. Address and size must be multiples of 16.
            tl.inline_asm_elementwise(
                """{ .reg .pred p; .reg .b32 n; .reg .b64 a; mov.u32 n, %tid.x; setp.eq.u32 p, n, 0;
                and.b64 a, $1, -16; and.b32 n, $2, -16;
                @p cp.async.bulk.prefetch.L2.global [a], n; mov.u32 $0, 0; }""",
                "=r,l,r", [base, length], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            for start in range(0, length, 32 * 128):
                prefetch_l2(base + tl.minimum(start + tl.arange(0, 32) * 128, length - 1))
