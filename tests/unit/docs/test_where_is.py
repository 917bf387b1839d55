"""docs/where-is.md names files that exist, and symbols that are defined in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs_tools.paths import DOCS, ROOT

ROW = re.compile(r"^\| (.+?) \| \[`(.+?)`\]\(\.\./(.+?)\) \| `(.+?)` \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "where-is.md").read_text())


def defined(path: Path) -> set[str]:
    """Functions and classes of a module, with the methods of its classes as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in methods}
    return found


def test_there_are_many_questions() -> None:
    assert len(ROWS) >= 40


@pytest.mark.parametrize(("question", "shown", "target", "symbol"), ROWS, ids=[row[0] for row in ROWS])
def test_file_and_symbol_exist(question: str, shown: str, target: str, symbol: str) -> None:
    assert shown == target
    assert (ROOT / target).is_file(), f"{question} {target} is gone: find its new place"
    assert symbol in defined(ROOT / target), f"{question} {target} does not define {symbol}"
