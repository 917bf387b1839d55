"""Global constants of kernels, trusted to stay as they are: a launch costs half the time of the host."""

from __future__ import annotations

from typing import Any

import triton


class _Trusted(dict[Any, Any]):
    """Constants of a kernel by name, as Triton keeps them: what calls the kernel finds them, a launch compares none."""

    def items(self) -> Any:
        return ()


def trust_constants() -> None:
    """Lets launches of kernels that this process compiles from now on begin without a look at their constants.

    Before each launch Triton (3.6, 3.7) compares every global constant that a kernel and the functions it calls use
    with what it was when the kernel was compiled: 65 of them, and two thirds of the 90 µs that a launch of the
    sampler's scan takes the host. Constants of these modules are never assigned again.
    """
    hook = triton.knobs.runtime.jit_post_compile_hook
    if getattr(hook, "trusts_constants", False):
        return

    def compiled(*, fn: Any, **described: Any) -> Any:
        kernel = fn.jit_function
        kernel.used_global_vals = _Trusted(kernel.used_global_vals)
        return hook(fn=fn, **described) if hook else None

    compiled.trusts_constants = True  # type: ignore[attr-defined]
    triton.knobs.runtime.jit_post_compile_hook = compiled
