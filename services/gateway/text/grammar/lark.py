"""llguidance's variant of Lark: literals, regular expressions, and the terminals of parameter values."""

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


_DEEPEST = 3
_OPENING = "<parameter=[^<>\\n]"
_CLOSING = "</parameter>"
_OPENED, _NAMED = re.compile(f"{_OPENING}{{1,256}}>"), re.compile(f"{_OPENING}{{1,256}}>|</function>\\n</tool_call>")


def stands(value: str) -> bool:
    """True if a value is read back as it is, whatever stands around it: it closes all that it opens, and nothing in it
    looks like its end."""
    depth, at = 0, 0
    for line in value.split("\n"):
        at += len(line) + 1
        if _OPENED.fullmatch(line):
            depth += 1
        elif line == _CLOSING:
            if not depth and _NAMED.match(value, at):
                return False
            depth = max(0, depth - 1)
    return not depth


def terminals() -> list[str]:
    """Terminals of texts that ``stands`` is true of, with what they are made of.

    VALUE: parameters nested up to three deep, and no `</parameter>` line that closes nothing. Names are short: a lexer
    has to pay for each character that it counts.
    BEHIND_ONE: what may follow a VALUE and such a line, and is of the same text.
    PLAIN: no line begins with either tag. It is for texts whose characters are counted or follow a pattern, which a
    lexer cannot do while it counts tags; and it is no complement, of which a lexer has to find out where it is empty.
    """
    rules = [
        f"OPENING: /{_OPENING}{{1,64}}>/",
        rf"LINE: /[^\n]*/ & ~(/{_OPENING}+>/ | /<\/parameter>/)",
    ]
    inside = "LINE"
    for depth in range(1, _DEEPEST + 1):
        rules.append(f'NESTED{depth}: OPENING "\\n" (({inside}) "\\n")* "{_CLOSING}"')
        inside = f"LINE | NESTED{depth}"
    plain = expression(f"{_other(['<parameter=', _CLOSING])}(\n{_other(['<parameter=', _CLOSING])})*")
    return [
        *rules,
        f'VALUE: ({inside}) ("\\n" ({inside}))*',
        r"BEHIND_ONE: VALUE & ~/<parameter=(?s:.*)|<\/function>(\n(?s:.*))?/",
        f"PLAIN: {plain}",
    ]


def _other(beginnings: list[str]) -> str:
    """A regular expression of lines that begin with none of these."""
    first = sorted({text[0] for text in beginnings})
    ways = [f"[^\n{''.join(map(quote, first))}][^\n]*"]
    for character in first:
        rest = [text[1:] for text in beginnings if text[0] == character]
        if all(rest):
            ways.append(f"{quote(character)}{_other(rest)}")
    return f"({'|'.join(ways)})?"
