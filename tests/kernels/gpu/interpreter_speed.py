"""What Triton's interpreter (3.6, 3.7) works out again for each operation and each call, worked out once.

The operations themselves, and their order, stay as they are: to the last bit the same numbers. Of the time that a
kernel took in the interpreter, two thirds went into these:

- each call of one jit function by another replaces all of triton.language once more, which the launch has done;
- each type of a tensor checks its shape, and writes its name, though a kernel has a handful of shapes;
- each tensor makes constants of its shape's numbers, and types of those constants;
- two tensors of one shape are compared by way of three new tuples, to find that nothing is to be broadcast;
- each operation on integers is done a second time in 64 bits, for an assertion that only `debug` turns on;
- each NumPy type is looked up in a table that is made for the purpose.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
from typing import Any


def quicken() -> None:
    """Once, where Triton interprets."""
    import numpy as np
    from triton._utils import validate_block_shape
    from triton.language import core, semantic
    from triton.runtime import interpreter

    _replace_calls(interpreter)

    slow_np_dtype = interpreter._get_np_dtype
    of_scalar = functools.cache(slow_np_dtype)
    addresses = np.dtype(np.uint64)

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return addresses if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = get_np_dtype

    @functools.cache
    def block_shape(sizes: builtins.tuple[Any, ...]) -> builtins.tuple[Any, int, str]:
        shape = core.tuple(sizes)
        return shape, validate_block_shape(shape), str(shape)

    slow_block_init = core.block_type.__init__

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = builtins.tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if not sizes or not all(type(size) is int for size in sizes):
            slow_block_init(self, element_ty, shape)  # which says what is wrong
            return
        self.element_ty = element_ty
        self.shape, self.numel, written = block_shape(sizes)
        self.name = f"<{written}, {element_ty}>"

    core.block_type.__init__ = init_block

    @functools.cache
    def tensor_shape(sizes: builtins.tuple[int, ...]) -> builtins.tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = tensor_shape(builtins.tuple(type.shape.values) if type.is_block() else ())

    core.tensor.__init__ = init_tensor

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_values

    sanitize = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = sanitize_overflow


def _replace_calls(interpreter: Any) -> None:
    """Of what replaces triton.language: only what a launch has not replaced yet."""
    from triton.language import core

    replaced: set[Any] = set()
    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in replaced:
            patch_lang(self.fn)
            replaced.add(self.fn)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    @functools.cache
    def names_of_builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def new_member(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, new_member)

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_attr = patch_attr
