"""Digest of our own code: a record that names it says which code made a result."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
TRAINING_SOURCES = ("services/trainer", "services/engine/models", "kernels")
"""Code that the numbers of a trained version depend on."""


def sources_digest(packages: Sequence[str]) -> str:
    """Hex sha256 of the Python files of packages, by path and contents. Raises OSError."""
    total = hashlib.sha256()
    for package in packages:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(_ROOT).as_posix()}\0{digest}\n".encode())
    return total.hexdigest()
