"""Lookahead in text that arrives in pieces: what it does not decide yet is told by an exception."""

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


_SPACE = " \t\r\n"
_LONGEST_SPACE = 64
_LONGEST_NAME = 256


class NeedMoreText(Exception):
    """The text so far does not decide."""


class Lookahead:
    """A buffer with the text from some place on."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False  # nothing follows the buffer

    def _followed(self, position: int, tags: tuple[str, ...]) -> bool:
        """True if one of the tags, or the end of the text, follows."""
        start = self._space(position)
        if self._final and start == len(self._buffer):
            return True
        return self._tag(start, tags) is not None

    def _space(self, position: int = 0) -> int:
        """Place where white space ends.

        Raises:
            NeedMoreText: more of it may follow.
        """
        end = position
        stop = min(len(self._buffer), position + _LONGEST_SPACE)
        while end < stop and self._buffer[end] in _SPACE:
            end += 1
        if end == len(self._buffer) and end < position + _LONGEST_SPACE and not self._final:
            raise NeedMoreText
        return end

    def _tag(self, position: int, tags: tuple[str, ...]) -> str | None:
        """Tag, of those given, that stands at the position; None: none of them.

        Raises:
            NeedMoreText: one of them begins there.
        """
        for tag in tags:
            if self._buffer.startswith(tag, position):
                return tag
        left = len(self._buffer) - position
        if not self._final and any(left < len(tag) and tag.startswith(self._buffer[position:]) for tag in tags):
            raise NeedMoreText
        return None

    def _named(self, position: int, tag: str) -> tuple[str, int] | None:
        """The name in a tag and the position behind it; None if it is not one.

        Raises:
            NeedMoreText: the tag is not closed yet.
        """
        raw = self._raw_name(position, tag)
        return (raw[0].strip(), raw[1]) if raw is not None and raw[0].strip() else None

    def _raw_name(self, position: int, tag: str) -> tuple[str, int] | None:
        """Name in a tag with the white space around it, of which alone it may consist, and the position behind it."""
        start = position + len(tag)
        text = self._buffer[start : start + _LONGEST_NAME + 1]
        stop = next((index for index, character in enumerate(text) if character in "<>\n"), None)
        if stop is None:
            if len(text) > _LONGEST_NAME or self._final:
                return None
            raise NeedMoreText
        return (text[:stop], start + stop + 1) if text[stop] == ">" else None
