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
    # The one control character that JSON leaves as it is and Lark does not take.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    it. Anchors count at the ends of the pattern's alternatives; elsewhere they are left to the compiler to refuse.

    Dialects differ in what `\\w`, `\\d`, `\\s` and `.` match; what all of them agree on is taken."""
    return "|".join(map(_searched, _alternatives(pattern)))


_AGREED = {"w": "A-Za-z0-9_", "d": "0-9", "s": r" \t\n\r\x0b\x0c"}
_NO_LINE_END = r"[^\n\r\u2028\u2029]"


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Each character or escape, and whether it is in a class."""
    in_class, position = False, 0
    while position < len(pattern):
        length = 2 if pattern[position] == "\\" else 1
        piece = pattern[position : position + length]
        position += length
        if not in_class and piece == "[":
            in_class = True
            yield piece, False
        elif in_class and piece == "]":
            in_class = False
            yield piece, False
        else:
            yield piece, in_class


def _agreed(pattern: str) -> str:
    written = []
    for piece, in_class in _pieces(pattern):
        if piece == "." and not in_class:
            piece = _NO_LINE_END
        elif len(piece) == 2 and piece[1] in _AGREED:
            members = _AGREED[piece[1]]
            piece = members if in_class else f"[{members}]"
        written.append(piece)
    return "".join(written)


def _searched(pattern: str) -> str:
    start = "" if pattern.startswith("^") else ANY
    pattern = pattern.removeprefix("^")
    end = ANY
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern, end = pattern[:-1], ""
    return f"{start}(?:{_agreed(pattern)}){end}"


def _alternatives(pattern: str) -> list[str]:
    """Splits at each `|` that is in no group and no class."""
    parts, depth = [""], 0
    for piece, in_class in _pieces(pattern):
        if piece == "|" and depth == 0 and not in_class:
            parts.append("")
            continue
        if not in_class and piece in "()":
            depth += 1 if piece == "(" else -1
        parts[-1] += piece
    return parts
