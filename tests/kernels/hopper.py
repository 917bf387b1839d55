"""Compiles kernels for Hopper (sm_90) on a machine without a GPU: the real launchers, called with CPU tensors.

Must be a process of its own: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled() -> Iterator[None]:
    """Inside, launching a kernel compiles it for sm_90, or finds it in Triton's cache on disk, and runs nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kernels.gpu.launch.compiler import prepare_compiler
    from services.engine.executors.cuda.compile_ahead import Target

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton interprets in this process: compile in another one")
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    # For good: this process is for compiling, and may have no driver to go back to.
    driver.set_active(Target(GPUTarget("cuda", 90, 32)))
    prepare_compiler()
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original
