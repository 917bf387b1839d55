"""Tokens of one completion to text, piece by piece: whole characters only, and nothing that may be a stop string.

The pieces joined are exactly the text that a non-streamed answer has, however the tokens arrive.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

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
    """Incremental detokenizer with stop strings.

    Args:
        vocabulary: bytes of tokens.
        stop: strings that end the text; they are not part of it.
        min_tokens: a stop string that ends within the first ``min_tokens`` tokens does not count.
    """

    def __init__(self, vocabulary: Vocabulary, *, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._partial = b""  # of a character
        self._held = ""
        self._emitted = 0  # characters given out
        self._search_from = 0  # a match must end after this position of the whole text
        self._entries: deque[tuple[int, Any]] = deque()
        self._tokens = 0
        self._stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: whatever follows is not part of the answer."""
        return self._stopped_by is not None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found, if one was: of several the one that begins first, of those the shortest."""
        return self._stopped_by

    @property
    def tokens(self) -> int:
        """Tokens taken, the one that completed a stop string included."""
        return self._tokens

    @property
    def length(self) -> int:
        """Characters of the whole text so far, those held back included."""
        return self._emitted + len(self._held)

    def push(self, token_id: int, entry: Any = None, *, visible: bool = True) -> None:
        """Takes the next token. ``entry`` comes out again with the text that the token begins in.

        A token that ended the completion (eos) is not ``visible``: it counts, but adds no text and no entry.
        """
        if self._stopped_by is not None:
            return
        self._tokens += 1
        if not visible:
            return
        if entry is not None:
            self._entries.append((self.length, entry))
        text = self._decode(self._vocabulary.visible_bytes(token_id), final=False)
        if text:
            self._held += text
            if self._stop:
                self._find_stop(len(text))

    def _decode(self, raw: bytes, *, final: bool) -> str:
        # As the standard library's incremental decoder does it, without its three frames a token.
        data = self._partial + raw
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        return text

    def _find_stop(self, added: int) -> None:
        if self._tokens <= self._min_tokens:
            self._search_from = self.length
            return
        new = max(len(self._held) - added, self._search_from - self._emitted)
        found = [(at, text) for text in self._stop if (at := self._held.find(text, max(0, new - len(text) + 1))) >= 0]
        if found:
            begin, self._stopped_by = min(found, key=lambda match: (match[0], len(match[1])))
            self._held = self._held[:begin]

    def take(self, *, final: bool = False) -> Piece:
        """The text that no later token can change; with ``final`` all that is left."""
        if final and not self.stopped:
            tail = self._decode(b"", final=True)
            self._held += tail
            if self._stop:
                self._find_stop(len(tail))
        text, self._held = self._held, ""
        if self._stop and not (final or self.stopped) and (held := self._open_suffix(text)):
            text, self._held = text[:-held], text[-held:]
        self._emitted += len(text)
        piece = Piece(text)
        last = final and not self.stopped
        while self._entries and (last or self._entries[0][0] < self._emitted):
            offset, entry = self._entries.popleft()
            piece.offsets.append(offset)
            piece.entries.append(entry)
        return piece

    def _open_suffix(self, text: str) -> int:
        """Length of its longest end that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
