"""A small text game: a hidden number is guessed, and each miss is told to be too low or too high.

A hidden number of seven is found in three guesses whatever it is, if each halves what is left. Who forgets what was
said finds fewer.
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

    numbers: int = Field(7, ge=2, le=1000)
    """The hidden number is 1 to this."""
    guesses: int = Field(3, ge=1, le=100)


class Guess(Environment):
    """See the module. The reward is 1 for the guess that hits, else 0."""

    name: ClassVar[str] = "guess"
    description: ClassVar[str] = "A hidden number is guessed; a miss is told to be too low or too high."
    params: ClassVar[type[Params]] = GuessParams
    action_schema: ClassVar[Mapping[str, Any]] = object_schema({"message": {"type": "string"}})
    observation_schema: ClassVar[Mapping[str, Any]] = object_schema({"text": {"type": "string"}})

    def _begin(self, params: Params) -> Observation:
        if not isinstance(params, GuessParams):
            raise TypeError(f"not parameters of this game: {params!r}")
        self._numbers, self._guesses = params.numbers, params.guesses
        self._hidden = random.Random(params.seed).randint(1, params.numbers)
        return Observation({"text": f"Guess a number from 1 to {self._numbers}."})

    def _take(self, action: Mapping[str, Any]) -> Observation:
        found = _NUMBER.search(message_of(action))
        # A number of thousands of digits is not read: int() takes time that grows with the square of them.
        guess = int(found.group()) if found is not None and len(found.group()) <= 9 else None
        if guess == self._hidden:
            return Observation({"text": "Right."}, 1.0, done=True)
        last = self.steps + 1 >= self._guesses
        if guess is None or not 1 <= guess <= self._numbers:
            text = f"Say a number from 1 to {self._numbers}."
        else:
            text = "Higher." if guess < self._hidden else "Lower."
        return Observation({"text": text}, 0.0, done=last)

    def _secrets(self) -> dict[str, Any]:
        return {"hidden": self._hidden} if hasattr(self, "_hidden") else {}
