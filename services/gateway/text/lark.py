"""Writing llguidance's variant of Lark: literals, regular expressions, and patterns of JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

ANY = "(?s:.*)"
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/#&~\-]")


def literal(text: str) -> str:
    """A terminal that is this text."""
    return json.dumps(text, ensure_ascii=False)


def one_of(texts: list[str]) -> str:
    """A terminal that is one of these."""
    return f"({' | '.join(map(literal, texts))})"


def quote(text: str) -> str:
    """The text inside a regular expression."""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), text)


def expression(regex: str) -> str:
    """A terminal that matches a regular expression as a whole."""
    written = "".join(_delimited(regex))
    # An empty literal would begin a comment.
    return f"/{written}/" if written else '""'


def _delimited(regex: str) -> Iterator[str]:
    """The expression as it may stand between slashes on one line."""
    escaped = False
    for character in regex:
        if character in _CONTROL:
            # What is escaped is the control character: \ + newline is a newline.
            yield _CONTROL[character][1:] if escaped else _CONTROL[character]
            escaped = False
            continue
        if character == "/" and not escaped:
            yield "\\"
        yield character
        escaped = character == "\\" and not escaped


def contains(texts: list[str]) -> str:
    """A terminal that matches every text with one of these in it."""
    return expression(f"{ANY}(?:{'|'.join(map(quote, texts))}){ANY}")


def search(pattern: str) -> str:
    """A regular expression that matches a whole text in which ``pattern`` is found, as JSON schema's `pattern` means
    it. Anchors count at the ends of the pattern's alternatives; elsewhere they are left to the compiler to refuse."""
    return "|".join(map(_searched, _alternatives(pattern)))


def _searched(pattern: str) -> str:
    start = "" if pattern.startswith("^") else ANY
    pattern = pattern.removeprefix("^")
    end = ANY
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern, end = pattern[:-1], ""
    return f"{start}(?:{pattern}){end}"


def _alternatives(pattern: str) -> list[str]:
    """Splits at each `|` that is in no group and no class."""
    parts, depth, in_class, start, position = [], 0, False, 0, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[start:position])
            start = position + 1
        position += 1
    return [*parts, pattern[start:]]
