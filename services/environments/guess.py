"""A small text game: a hidden number is guessed, and each miss is told to be too low or too high, with what is left.

The hidden one of three numbers is found in two guesses whatever it is, if the first is the middle one and the second
heeds what was said of it. Who forgets that finds two of three.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from services.environments.base import Environment, Observation, Params, message_of, object_schema

_NUMBER = re.compile(r"-?\d+")


class GuessParams(Params):
    """Parameters of a game."""

    lowest: int | None = Field(None, ge=0, le=10**6)
    """The lowest number that it may be; None: one to seven, drawn."""
    numbers: int = Field(3, ge=2, le=1000)
    """Numbers that it may be."""
    guesses: int = Field(2, ge=1, le=100)


class Guess(Environment):
    """See the module. The reward is 1 for the guess that hits, else 0."""

    name: ClassVar[str] = "guess"
    description: ClassVar[str] = "A hidden number is guessed; a miss is told to be too low or high, and what is left."
    params: ClassVar[type[Params]] = GuessParams
    action_schema: ClassVar[Mapping[str, Any]] = object_schema({"message": {"type": "string"}})
    observation_schema: ClassVar[Mapping[str, Any]] = object_schema({"text": {"type": "string"}})

    def _begin(self, params: Params) -> Observation:
        if not isinstance(params, GuessParams):
            raise TypeError(f"not parameters of this game: {params!r}")
        drawn = random.Random(params.seed)
        self._guesses = params.guesses
        self._lowest = drawn.randint(1, 7) if params.lowest is None else params.lowest
        self._highest = self._lowest + params.numbers - 1
        self._hidden = drawn.randint(self._lowest, self._highest)
        return Observation({"text": f"What number is it, from {self._lowest} to {self._highest}?"})

    def _take(self, action: Mapping[str, Any]) -> Observation:
        found = _NUMBER.search(message_of(action))
        # A number of thousands of digits is not read: int() takes time that grows with the square of them.
        guess = int(found.group()) if found is not None and len(found.group()) <= 9 else None
        if guess == self._hidden:
            return Observation({"text": "Right."}, 1.0, done=True)
        last = self.steps + 1 >= self._guesses
        if guess is None or not self._lowest <= guess <= self._highest:
            text = f"Say a number from {self._lowest} to {self._highest}."
        else:
            higher = guess < self._hidden
            self._lowest, self._highest = (guess + 1, self._highest) if higher else (self._lowest, guess - 1)
            text = f"It is {'higher' if higher else 'lower'}, from {self._lowest} to {self._highest}."
        return Observation({"text": text}, 0.0, done=last)

    def _secrets(self) -> dict[str, Any]:
        return {"hidden": self._hidden} if hasattr(self, "_hidden") else {}
