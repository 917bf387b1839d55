"""Tokens of one completion to text, piece by piece: whole characters only, and nothing that may be a stop string.

The pieces joined are exactly the text that a non-streamed answer has, however the tokens arrive.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from services.gateway.text.stops import Stops, StopSearch
from services.gateway.text.vocabulary import Vocabulary


@dataclass(slots=True)
class Piece:
    """Text that is final, with the log-probability entries of the tokens that begin in it."""

    text: str = ""
    entries: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the whole text each entry's token begins, in characters."""

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, self.entries + other.entries, self.offsets + other.offsets)

    def __iadd__(self, other: Piece) -> Self:
        self.text += other.text
        self.entries += other.entries
        self.offsets += other.offsets
        return self


class TextAssembler:
    """Incremental detokenizer, with stop strings where all of the text is the answer's.

    Args:
        vocabulary: bytes of tokens.
        stop: strings that end the text; they are not part of it.
        min_tokens: a stop string that ends within the first ``min_tokens`` tokens does not count.
    """

    def __init__(self, vocabulary: Vocabulary, *, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._vocabulary = vocabulary
        self._stops = Stops(stop, min_tokens=min_tokens)
        self._search = StopSearch(self._stops) if self._stops else None
        self._partial = b""  # of a character
        self._text = ""  # that no later token can change, and was not given out
        self._emitted = 0  # characters given out
        self._length = 0
        self._entries: deque[tuple[int, Any]] = deque()
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: whatever follows is not part of the answer."""
        return self._stops.found is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found, if one was."""
        return None if self._stops.found is None else self._stops.found.text

    @property
    def tokens(self) -> int:
        """Tokens taken, the one that completed a stop string included."""
        return self._tokens

    @property
    def length(self) -> int:
        """Characters of the whole text so far, those held back included."""
        return self._length

    def push(self, token_id: int, entry: Any = None, *, visible: bool = True) -> None:
        """Takes the next token. ``entry`` comes out again with the text that the token begins in.

        A token that ended the completion (eos) is not ``visible``: it counts, but adds no text and no entry.
        """
        if self._stops.found is not None:
            return
        self._tokens += 1
        if not visible:
            return
        if entry is not None:
            self._entries.append((self._length, entry))
        text = self._decode(self._vocabulary.visible_bytes(token_id), final=False)
        if self._search is not None:
            self._stops.take(self._tokens, token_id, self._length, self._length + len(text))
        self._add(text)

    def _decode(self, raw: bytes, *, final: bool) -> str:
        # As the standard library's incremental decoder does it, without its three frames a token.
        data = self._partial + raw
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        return text

    def _add(self, text: str) -> None:
        begin = self._length
        self._length += len(text)
        if self._search is not None:
            text = self._search.add(text, begin)
            if self._stops.found is not None:
                self._length = self._stops.found.begin
        self._text += text

    def take(self, *, final: bool = False) -> Piece:
        """The text that no later token can change; with ``final`` all that is left."""
        if final and self._stops.found is None:
            self._add(self._decode(b"", final=True))
            if self._search is not None:
                self._text += self._search.close()
        text, self._text = self._text, ""
        self._emitted += len(text)
        piece = Piece(text)
        last = final and self._stops.found is None
        while self._entries and (last or self._entries[0][0] < self._emitted):
            offset, entry = self._entries.popleft()
            piece.offsets.append(offset)
            piece.entries.append(entry)
        return piece
