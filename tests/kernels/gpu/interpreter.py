"""Four things that Triton's interpreter (3.6, 3.7) gets wrong, put right: import before kernels run in it.

It keeps bfloat16 as the integers of its bits, and tl.dot multiplies those; range() over a loaded bound fails with
NumPy >= 2.4, which no longer takes an array of one element for a number; a float32 whose mantissa rounds up to 2
loses the carry on its way to e4m3, which makes 0.5 of 0.98; and tl.dot adds up as the CPU's BLAS does, which on some
CPUs treats rows of one tile differently (OpenBLAS 0.3.31 on Zen 5), where a tensor core treats them alike. Products
that are summed in float64 and rounded once do not show the order.
"""

from __future__ import annotations

import os
from typing import Any

from tests.kernels.gpu.interpreter_speed import quicken


def repair() -> None:
    """Does nothing where Triton does not interpret, and nothing the second time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "repaired", False):
        return
    builder = interpreter.InterpreterBuilder
    create_dot, patch_tensor = builder.create_dot, interpreter._patch_lang_tensor
    convert_float = interpreter._convert_float

    def numbers(handle: Any) -> Any:
        kind = handle.dtype.scalar
        if kind == tl.bfloat16:
            return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if kind.primitive_bitwidth == 8 and kind.is_floating():
            return interpreter._convert_float(handle.data, kind, tl.float16, None).view(np.float16)
        return handle.data

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.dtype.scalar != tl.float32:
            return create_dot(self, a, b, d, *rest)
        product = np.matmul(numbers(a), numbers(b), dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def patch(tensor: Any, scope: Any) -> Any:
        done = patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        return done

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return convert_float(x, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32).reshape(-1))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(x.shape)

    builder.create_dot = dot
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch
    interpreter.repaired = True
    quicken()


repair()
