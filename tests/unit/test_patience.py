"""Patience of tests, on machines that are full of them: clients say how long they wait, as httpx itself gives up after
five seconds, and nothing has to have happened within a few seconds, which one step of a server may take."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WAITING = {"Client", "AsyncClient", "request", "stream", "get", "head", "options", "post", "put", "patch", "delete"}
CLOCKS = {"monotonic", "perf_counter"}
"""Of the wall; ``process_time`` counts what this process computed."""
LEAST_SECONDS = 5


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


def hasty(source: str) -> Iterator[int]:
    """Lines that compare the time since something with an upper bound of less than LEAST_SECONDS."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            if (
                isinstance(operator, ast.Lt | ast.LtE)
                and isinstance(left, ast.BinOp)
                and isinstance(left.op, ast.Sub)
                and isinstance(left.left, ast.Call)
                and isinstance(left.left.func, ast.Attribute)
                and left.left.func.attr in CLOCKS
                and isinstance(right, ast.Constant)
                and right.value < LEAST_SECONDS
            ):
                yield node.lineno


def test_what_is_found() -> None:
    assert list(impatient("httpx.get(url)\nhttpx.Client(timeout=3)\nhttpx.post(url, **more)\nclient.get(url)")) == [1]
    assert list(hasty("assert 1 < time.monotonic() - began < 4\nperf() < 1\ntime.monotonic() - began < 5")) == [1]


def test_every_client_says_how_long_it_waits() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    found = [f"{path}:{line}" for path, text in files.items() if "httpx" in text for line in impatient(text)]
    assert found == [], "give them timeout=PATIENCE of tests.stack"


def test_no_verdict_is_a_matter_of_a_few_seconds() -> None:
    """A slow machine is no failure: hold the other side by an event, count, or let the wrong way take far longer."""
    found = [f"{path}:{line}" for path in TESTS.rglob("*.py") for line in hasty(path.read_text(encoding="utf-8"))]
    assert found == []
