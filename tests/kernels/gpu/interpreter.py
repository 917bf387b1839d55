"""Two things that Triton's interpreter (3.6, 3.7) gets wrong, put right: import before kernels run in it.

It keeps bfloat16 as the integers of its bits, and tl.dot multiplies those; and range() over a loaded bound fails with
NumPy >= 2.4, which no longer takes an array of one element for a number.
"""

from __future__ import annotations

import os
from typing import Any


def repair() -> None:
    """Does nothing where Triton does not interpret, and nothing the second time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "repaired", False):
        return
    builder = interpreter.InterpreterBuilder
    create_dot, patch_tensor = builder.create_dot, interpreter._patch_lang_tensor

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    def patch(tensor: Any, scope: Any) -> Any:
        done = patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        return done

    builder.create_dot = dot
    interpreter._patch_lang_tensor = patch
    interpreter.repaired = True


repair()
