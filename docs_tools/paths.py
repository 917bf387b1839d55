"""Paths of the repository, its pages and its packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOPS = ("services", "kernels", "cli", "benchmarks", "observability", "images", "docs_tools", "proto", "models")
"""Top-level folders of code."""
_OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "charts/temper/README.md")


def pages() -> list[Path]:
    """Every page that a reader may be sent to: those of docs/ and the few beside it."""
    return [*(ROOT / name for name in _OUTSIDE), *sorted(DOCS.rglob("*.md"))]


def packages() -> Iterator[Path]:
    """Every Python package of the code, parents before children."""
    for top in TOPS:
        for initial in sorted((ROOT / top).rglob("__init__.py"), key=lambda path: path.parent.parts):
            if initial.parent.name != "pb":
                yield initial.parent
