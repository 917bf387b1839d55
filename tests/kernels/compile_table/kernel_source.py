"""Source of a Triton kernel with all of ours that it calls, as a text that changes only if what is compiled does.

Triton's own hash of a kernel also changes with comments, with the line that it begins in, and with Triton's version.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITCallable

_Scope = Mapping[str, Any]


def source_of(kernel: JITCallable) -> str:
    """Functions that a kernel reaches, itself first, without comments and docstrings; and the constants they read."""
    texts: dict[JITCallable, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop(0)
        if function in texts:
            continue
        tree = function.parse()
        scope = function.get_capture_scope()
        reached = list(_globals(tree, scope))
        constants = sorted({f"{name} = {value!r}" for name, value in reached if _is_constant(value)})
        calls = {name: value for name, value in reached if isinstance(value, JITCallable) and not _of_triton(value)}
        waiting += [calls[name] for name in sorted(calls)]
        texts[function] = "\n".join([ast.unparse(_bare(tree)), *constants])
    return "\n\n".join(texts.values())


def _globals(tree: ast.AST, scope: _Scope) -> Iterator[tuple[str, Any]]:
    """Names of other places, also of modules' attributes, and what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            value = _value(node, scope)
            if value is not None:
                yield ast.unparse(node), value


def _value(node: ast.AST, scope: _Scope) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(module := _value(node.value, scope), ModuleType):
        return getattr(module, node.attr, None)
    return None


def _is_constant(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | tl.constexpr)


def _of_triton(function: JITCallable) -> bool:
    return str(function.fn.__module__).partition(".")[0] == "triton"


def _bare(tree: ast.AST) -> ast.AST:
    """The tree without docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None and len(node.body) > 1:
            del node.body[0]
    return tree
