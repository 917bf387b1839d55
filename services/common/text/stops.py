"""Stops, which end an answer's text early: stop strings and stop tokens, looked for in what a client sees of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.text.lookahead import open_suffix


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop that was met. Places are characters of the answer's whole text, markup and all."""

    text: str | None
    """The stop string; None: a stop token."""
    begin: int
    """The answer's text ends here."""
    end: int
    """End of the stop itself: the first token whose text reaches it is the answer's last."""
    tokens: int | None = None
    """Number of tokens up to and with the stop token."""


class Stops:
    """The stops of one answer. Each text of it that a client sees has a ``StopSearch`` of its own.

    Of several stops that one counts which is complete first, wherever pieces of text begin; of those that are at once,
    the one that begins first.

    Args:
        strings: that end the text and are not part of it.
        token_ids: of tokens that do the same, each of which has text.
        min_tokens: what ends within the first ``min_tokens`` tokens does not count.
    """

    def __init__(
        self, strings: Sequence[str] = (), *, token_ids: Iterable[int] = frozenset(), min_tokens: int = 0
    ) -> None:
        self.found: Stop | None = None
        self.strings = tuple(text for text in strings if text)
        self._token_ids = frozenset(token_ids)
        self._min_tokens = min_tokens
        self._counts_from = 0  # what ends there or before does not count
        self._tokens: deque[Stop] = deque()  # whose text was not looked at yet

    def __bool__(self) -> bool:
        return bool(self.strings or self._token_ids)

    def take(self, number: int, token_id: int, begin: int, end: int) -> None:
        """The place of each token's text, before that is searched.

        Args:
            number: 1 for the first token of the answer.
            token_id: of the token.
            begin: where its text begins.
            end: where it ends.
        """
        if number <= self._min_tokens:
            self._counts_from = end
        elif self._token_ids and token_id in self._token_ids:
            # A token that is the beginning of a character is in the place of that.
            self._tokens.append(Stop(None, begin, max(end, begin + 1), number))

    def look(self, text: str, begin: int, known: int) -> Stop | None:
        """The first stop in a text that a client sees.

        Args:
            text: it, from a place on.
            begin: that place.
            known: how much of it was looked at before.
        """
        found = [stop for stop in (self._string(one, text, begin, known) for one in self.strings) if stop is not None]
        new, end = begin + known, begin + len(text)
        while self._tokens and self._tokens[0].begin < end:
            token = self._tokens[0]
            if token.end > new:
                found.append(Stop(None, max(token.begin, new), token.end, token.tokens))
                break
            self._tokens.popleft()
        self.found = min(found, key=lambda stop: (stop.end, stop.begin), default=None)
        return self.found

    def find(self, text: str, place: int) -> int | None:
        """Place where the first stop string begins in a text that is known as a whole at one place."""
        if place <= self._counts_from:
            return None
        found = [(at + len(one), at, one) for one in self.strings if (at := text.find(one)) >= 0]
        if not found:
            return None
        _, begin, wanted = min(found)
        self.found = Stop(wanted, place, place)
        return begin

    def _string(self, wanted: str, text: str, begin: int, known: int) -> Stop | None:
        counts = self._counts_from - begin
        at = text.find(wanted, max(0, known + 1 - len(wanted), counts + 1 - len(wanted)))
        return None if at < 0 else Stop(wanted, begin + at, begin + at + len(wanted))


class StopSearch:
    """Searches one text that a client sees: the whole of it, or what stands between markup.

    Args:
        stops: of the answer.
    """

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._held = ""
        self._begin = 0  # of what is held

    @property
    def held_from(self) -> int | None:
        """Beginning of the text that is held back because a stop may begin in it; None: nothing is held back."""
        return self._begin if self._held else None

    def add(self, text: str, begin: int) -> str:
        """Takes the next piece; returns what no stop begins in. Of a stop that is found nothing is returned, nor of
        what follows it.

        Args:
            text: it follows the piece before it.
            begin: where in the answer's whole text it stands.
        """
        stops, known = self._stops, len(self._held)
        if stops.found is not None or not text:
            return ""
        if not known:
            self._begin = begin
        text, self._held = self._held + text, ""
        stop = stops.look(text, self._begin, known)
        if stop is not None:
            return text[: stop.begin - self._begin]
        certain = len(text) - (open_suffix(text, stops.strings) if stops.strings else 0)
        self._begin += certain
        self._held = text[certain:]
        return text[:certain]

    def close(self) -> str:
        """The text is over; returns what was held back of it."""
        text, self._held = self._held, ""
        return text
