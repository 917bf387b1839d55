"""Detokenizer: the tokens of one completion become text, whole characters only, and nothing that may be a stop string.

The pieces joined are exactly the text that a non-streamed answer has, however the tokens arrive."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from services.common.text.stops import Stop, Stops, StopSearch
from services.common.text.tokenizer import TextCodec

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Control tokens that the gateway's parsers read, so they stay visible even if a tokenizer marks them special."""


class Vocabulary:
    """Bytes and text of single tokens.

    Args:
        codec: the model's tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._bytes: dict[int, bytes] = {}
        self._visible: dict[int, bytes] = {}
        self.markup: Mapping[str, int] = {
            token: number for token in MARKUP if (number := codec.token_id(token)) is not None
        }
        """Ids of those that are a token of this model."""
        self._hidden = frozenset(codec.special_ids) - frozenset(self.markup.values())

    @cached_property
    def numbered(self) -> Vocabulary:
        """The same vocabulary with ids for texts, as vLLM's `return_tokens_as_token_ids` names tokens."""
        return _Numbered(self._codec)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, also of a special one."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._codec.token_bytes(token_id)
        return known

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for a special token."""
        known = self._visible.get(token_id)
        if known is None:
            known = self._visible[token_id] = b"" if token_id in self._hidden else self.token_bytes(token_id)
        return known

    def is_text(self, token_id: int) -> bool:
        """True if a token adds to the text, be it markup; control tokens do not."""
        return bool(self.visible_bytes(token_id))

    def token_text(self, token_id: int) -> str:
        """A token on its own, for logprobs; bytes that are not UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def text(self, token_ids: list[int]) -> str:
        """Visible text of some tokens."""
        return b"".join(map(self.visible_bytes, token_ids)).decode("utf-8", "replace")


class _Numbered(Vocabulary):
    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


@dataclass(slots=True)
class Piece:
    """Text that is final, with the log-probability entries of the tokens that begin in it."""

    text: str = ""
    entries: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Places in the whole text where each entry's token begins, in characters."""

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


class _Token(NamedTuple):
    token_id: int
    sampling_logprob: float
    end: int
    """End of its text, in characters of the whole."""


Certain = tuple[Piece, list[int], list[float]]
"""Raw text with its log-probabilities; token ids; their sampling log-probabilities."""


@dataclass(slots=True)
class HeldBackText:
    """Text of one choice that may still be cut off by a stop. What was taken stays: its tokens are the answer's."""

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
        """Text and tokens that end at a place or before it."""
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
