"""Looking for tags in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def open_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that one of ``tags`` begins with, without being it."""
    for length in range(min(max(map(len, tags)) - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(tag.startswith(tail) for tag in tags):
            return length
    return 0


def open_space(text: str) -> int:
    """Length of the white space at the end of ``text``."""
    return len(text) - len(text.rstrip())
