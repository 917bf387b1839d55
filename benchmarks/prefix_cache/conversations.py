"""Conversations of random tokens, drawn for benchmarks.prefix_cache.noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Tokens = tuple[int, ...]

_TURNS = ((300, 2500), (50, 600), (50, 600))
"""Tokens of each message of a conversation, from and to."""
_LAST = (20, 200)
"""Tokens of the message behind it."""
SAID = 48
"""Tokens of an answer in the conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of random tokens."""

    turns: tuple[Tokens, ...]
    said: int
    """Tokens of each answer."""
    cut: float
    """Place of the last message: at the end, or at this part of what was said behind the first answer."""
    last: Tokens
    host: bool
    """True if only the host has the conversation when the last message comes."""

    def prompt(self, history: Tokens) -> Tokens:
        """Prompt of the last message, behind the conversation."""
        first = len(self.turns[0]) + self.said
        return (*history[: first + max(1, int(self.cut * (len(history) - first)))], *self.last)


def conversations(count: int, vocab_size: int, seed: int, shrink: float) -> list[Conversation]:
    """Conversations of every kind, as many of each, in turn."""
    random = np.random.default_rng(seed)

    def some(bounds: tuple[int, int]) -> Tokens:
        low, high = (max(4, round(bound / shrink)) for bound in bounds)
        return tuple(random.integers(0, vocab_size, random.integers(low, high + 1)).tolist())

    said = max(4, round(SAID / shrink))
    return [
        Conversation(
            tuple(map(some, _TURNS)),
            said,
            float(random.uniform(0.05, 0.95)) if number % 2 else 1.0,
            some(_LAST),
            host=number % 4 > 1,
        )
        for number in range(count)
    ]
