"""What computing tokens takes, learned from the steps that ran: the currency in which the prefix cache compares."""

from __future__ import annotations

from collections.abc import Iterable

_RECENT = 0.1
"""Weight of the newest step."""
_ENOUGH = 128
"""Tokens of a step that says something: what a shorter one takes is its launches and the reading of the weights."""


class ComputeCost:
    """Seconds of prefill: a token costs the same wherever it stands, but for the attention to all tokens before it.

    Args:
        token_seconds: first guess, of a token at the beginning of a prompt.
        attention: what the attention to one earlier token costs, as a part of everything else about a token.
    """

    def __init__(self, token_seconds: float, attention: float) -> None:
        if token_seconds <= 0 or attention < 0:
            raise ValueError(f"token_seconds {token_seconds} must be positive and attention {attention} not negative")
        self.token_seconds = token_seconds
        self._attention = attention

    def seconds(self, start: int, end: int) -> float:
        """Of the tokens in [start, end) of one prompt."""
        return self.token_seconds * self._weight(start, end)

    def observe(self, runs: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step of nothing but these prefill chunks, as (start, end), has taken so long."""
        runs = list(runs)
        if sum(end - start for start, end in runs) < _ENOUGH or seconds <= 0:
            return
        measured = seconds / sum(self._weight(start, end) for start, end in runs)
        self.token_seconds += _RECENT * (measured - self.token_seconds)

    def _weight(self, start: int, end: int) -> float:
        return (end - start) + self._attention * (end * end - start * start) / 2
