"""Text and tokens of an answer that cannot be told yet, because they may be behind the stop that ends it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.text.detokenizer import Piece
from services.gateway.text.stops import Stop


class _Token(NamedTuple):
    token_id: int
    sampling_logprob: float
    end: int
    """End of its text, in characters of the whole."""


Certain = tuple[Piece, list[int], list[float]]
"""Raw text with its log-probabilities; token ids; their sampling log-probabilities."""


@dataclass(slots=True)
class Unsure:
    """Text that may still be cut off, of one choice. What has been taken stays: so many tokens belong to the answer."""

    taken: int = 0
    """Tokens."""
    _begin: int = 0
    """Beginning of the text here, in characters of the whole."""
    _piece: Piece = field(default_factory=Piece)
    _tokens: deque[_Token] = field(default_factory=deque)

    def add(self, piece: Piece) -> None:
        """More raw text."""
        self._piece += piece

    def add_token(self, token_id: int, sampling_logprob: float, end: int) -> None:
        """The next token, and where its text ends."""
        self._tokens.append(_Token(token_id, sampling_logprob, end))

    def take(self, end: int) -> Certain:
        """What ends at a place or before it."""
        count = 0
        while count < len(self._tokens) and self._tokens[count].end <= end:
            count += 1
        return self._take(end, count)

    def end(self, stop: Stop) -> Certain:
        """The last of it: the text before a stop, and the tokens up to the one that completes it."""
        if stop.tokens is not None:
            count = stop.tokens - self.taken
        else:
            ends = (place for place, token in enumerate(self._tokens, start=1) if token.end >= stop.end)
            count = next(ends, len(self._tokens))
        return self._take(stop.begin, count)

    def _take(self, end: int, count: int) -> Certain:
        certain, piece, length = Piece(), self._piece, end - self._begin
        if length > 0:  # what waits for long is not copied for every token
            entries = bisect_left(piece.offsets, end)
            certain = Piece(piece.text[:length], piece.entries[:entries], piece.offsets[:entries])
            self._piece = Piece(piece.text[length:], piece.entries[entries:], piece.offsets[entries:])
            self._begin = end
        self.taken += count
        tokens = [self._tokens.popleft() for _ in range(count)]
        return certain, [token.token_id for token in tokens], [token.sampling_logprob for token in tokens]
