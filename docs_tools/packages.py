"""The tree of packages in docs/architecture.md and the map in docs/packages.md, from the packages' own docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs_tools.paths import DOCS, ROOT, packages

ARCHITECTURE = DOCS / "architecture.md"
MAP = DOCS / "packages.md"
_BEGIN, _END = "<!-- packages -->\n", "<!-- /packages -->\n"
_TREE_DEPTH = 3
"""Depth of the tree in folders; the map has the others."""
_LINE = 90
_COLUMN = 27
_OTHERS = (
    ("proto/", "`temper.v1`: what gateways and engines say to each other."),
    ("tests/", "unit (mirrors the code), kernels, parity, integration, conformance, e2e, chart, guides."),
    ("charts/temper/", "The Helm chart, with dashboards and alert rules that `observability` writes."),
    ("docs/", "These pages."),
)
_HEADER = """# Packages

<!-- Written by `python -m docs_tools.generate` from the docstring of each package's __init__.py. -->

Each package in one line, and where its unit tests are. [Architecture](architecture.md) shows how they fit together.

| package | what is in it | unit tests |
|---|---|---|
"""


def purpose(package: Path) -> str:
    """First sentences of a package's docstring: as many sentences as fit a line, at least one.

    Raises:
        ValueError: it has none.
    """
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    if not text:
        raise ValueError(f"{package.relative_to(ROOT)}/__init__.py says nothing: give it a docstring of one line")
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split("\n\n")[0].split()))
    for sentence in others:
        if len(first) + len(sentence) > _LINE:
            break
        first += f" {sentence}"
    return first


def tree() -> str:
    """The folders of the first levels, one line each."""
    lines = []
    for package in packages():
        *outer, name = package.relative_to(ROOT).parts
        if len(outer) < (_TREE_DEPTH if "services" in outer else _TREE_DEPTH - 1):
            lines.append(f"{'  ' * len(outer)}{name}/".ljust(_COLUMN) + purpose(package))
    lines += [name.ljust(_COLUMN) + text for name, text in _OTHERS]
    return "```text\n" + "\n".join(lines).replace("`", "") + "\n```\n"


def with_tree(page: str) -> str:
    """The page with a current tree between its two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{ARCHITECTURE.name} needs the lines {_BEGIN.strip()!r} and {_END.strip()!r}")
    return f"{before}{begin}\n{tree()}\n{end}{after}"


def whole_map() -> str:
    """Every package with its purpose and the folder of its tests."""
    rows = []
    for package in packages():
        path = package.relative_to(ROOT)
        tests = _tests(path)
        rows.append(f"| `{path}` | {purpose(package)} | {f'`{tests}`' if tests else ''} |\n")
    return _HEADER + "".join(rows)


def _tests(package: Path) -> Path | None:
    inside = package.relative_to("services") if package.parts[0] == "services" else package
    found = Path("tests", "unit", inside)
    return found if inside.parts and (ROOT / found).is_dir() else None
