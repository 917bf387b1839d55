"""Cost of computing tokens, in seconds, learned from finished steps. The prefix cache compares by it."""

from __future__ import annotations

from collections.abc import Iterable

_RECENT = 0.1
"""Weight of the newest step in the moving average."""
_ENOUGH = 128
"""Fewest tokens of a step that is measured. A shorter step mostly measures launches and reading the weights."""


class ComputeCost:
    """Cost of prefill. Every token costs the same, plus its attention to all tokens before it.

    Args:
        token_seconds: first estimate for a token at the beginning of a prompt.
        attention: cost of the attention to one earlier token, as a share of everything else about a token.
    """

    def __init__(self, token_seconds: float, attention: float) -> None:
        if token_seconds <= 0 or attention < 0:
            raise ValueError(f"token_seconds {token_seconds} must be positive and attention {attention} not negative")
        self.token_seconds = token_seconds
        self._attention = attention

    def seconds(self, start: int, end: int) -> float:
        """Seconds to compute the tokens in [start, end) of one prompt."""
        return self.token_seconds * self._weight(start, end)

    def observe(self, runs: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learns from a step that computed only these prefill chunks, given as (start, end), in so many seconds."""
        runs = list(runs)
        if sum(end - start for start, end in runs) < _ENOUGH or seconds <= 0:
            return
        measured = seconds / sum(self._weight(start, end) for start, end in runs)
        self.token_seconds += _RECENT * (measured - self.token_seconds)

    def _weight(self, start: int, end: int) -> float:
        return (end - start) + self._attention * (end * end - start * start) / 2
