"""Clients of tests say how long they wait: httpx itself gives up after five seconds, and a server on a machine full
of tests may take them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WAITING = {"Client", "AsyncClient", "request", "stream", "get", "head", "options", "post", "put", "patch", "delete"}


def impatient(source: str) -> Iterator[int]:
    """Lines of the calls of httpx that reach a server and have no ``timeout``."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "httpx"
            and node.func.attr in WAITING
            and not {"timeout", "transport", None} & {keyword.arg for keyword in node.keywords}
        ):
            yield node.lineno


def test_what_is_found() -> None:
    assert list(impatient("httpx.get(url)\nhttpx.Client(timeout=3)\nhttpx.post(url, **more)\nclient.get(url)")) == [1]


def test_every_client_says_how_long_it_waits() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    found = [f"{path}:{line}" for path, text in files.items() if "httpx" in text for line in impatient(text)]
    assert found == [], "give them timeout=PATIENCE of tests.stack"
