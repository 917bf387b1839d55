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
