"""Keeps control tokens out of user text.

A chat template joins its own control tokens (`<|im_start|>`, `<think>`, …) with text from clients into one string, and
the tokenizer cannot tell which is whose: a user who writes `<|im_end|>` would end the turn. So before rendering, a
marker character is put inside every control token that a client's string contains, and at the end of a string where
a part of one could be completed by its neighbour; after rendering, a control token with a marker inside is the
client's, and is encoded as the plain text it is. Where nothing is suspicious, text is tokenized exactly as usual.

Templates still see the text, so trimming and searching work. What a template looks for by a control token (Qwen's asks
whether a user turn is a `<tool_response>`) it no longer finds in a client's string, which is the point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEVER = "(?!)"
# Unicode noncharacters: no text in interchange contains them, so one of them is always free in practice.
_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def free_marker(*inputs: Any) -> str:
    """A marker character that occurs in none of the inputs' strings."""
    used = set().union(*(set(text) for value in inputs for text in _strings(value))) if inputs else set()
    for marker in _MARKERS:
        if marker not in used:
            return marker
    # Somebody sent all of them; the private use planes have 131,068 more.
    return next(chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rendered text; ``plain`` means control tokens in it must not be recognised."""

    text: str
    plain: bool


class ControlTokens:
    """A set of control tokens, and how to mark them in text that must not contain them."""

    def __init__(self, tokens: Sequence[str]) -> None:
        tokens = sorted({token for token in tokens if len(token) > 1 and not token.isspace()}, key=len, reverse=True)
        heads = {token[:size] for token in tokens for size in range(1, len(token))}
        tails = {token[-size:] for token in tokens for size in range(1, len(token))}

        def either(texts: set[str] | list[str]) -> str:
            return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or _NEVER

        self._token = re.compile(either(tokens))
        # Templates trim, so what counts is the first and the last character that is not white space.
        self._head_at_end = re.compile(rf"(?:{either(heads)})(?=\s*\Z)")
        # Possessive, or a megabyte of spaces would be looked at from each of them.
        self._tail_at_start = re.compile(rf"(\A\s*+|\A)(?={either(tails)})")

    def suspicious(self, value: Any) -> bool:
        """True if any string in ``value`` contains a control token or could be completed to one by its neighbours."""
        return any(
            self._token.search(text) or self._head_at_end.search(text) or self._tail_at_start.match(text)
            for text in _strings(value)
        )

    def mark(self, value: Any, marker: str) -> Any:
        """A copy of ``value`` with every string marked, keys of mappings too."""
        if isinstance(value, str):
            text = self._head_at_end.sub(lambda match: match.group() + marker, value)
            text = self._tail_at_start.sub(lambda match: match.group(1) + marker, text)
            return self._token.sub(lambda match: match.group()[0] + marker + match.group()[1:], text)
        if isinstance(value, Mapping):
            return {self.mark(key, marker): self.mark(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marker) for item in value]
        return value

    def pieces(self, rendered: str, marker: str) -> list[Piece]:
        """Splits marked text at the control tokens that have a marker inside, and drops the markers."""
        texts = rendered.split(marker)
        text = "".join(texts)
        joints: list[int] = []
        position = 0
        for part in texts[:-1]:
            position += len(part)
            joints.append(position)
        pieces: list[Piece] = []
        start = joint = 0
        for match in self._token.finditer(text):
            while joint < len(joints) and joints[joint] <= match.start():
                joint += 1
            if joint < len(joints) and joints[joint] < match.end():
                if start < match.start():
                    pieces.append(Piece(text[start : match.start()], plain=False))
                pieces.append(Piece(match.group(), plain=True))
                start = match.end()
        if start < len(text):
            pieces.append(Piece(text[start:], plain=False))
        return pieces
