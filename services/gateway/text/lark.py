"""Writing llguidance's variant of Lark: literals and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator

ANY = "(?s:.*)"
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/#&~\-]")


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
