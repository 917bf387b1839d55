"""Simulated visitors of a chat: what they ask, and how they react. What they want is known to nobody else.

A visitor asks one question. Most ask for a date some days away, which the tiny model believes to be a day later in
about half of all cases, some for a sum or a word. They want the exact answer: they rate it 1, anything else -1, and
half of those who are dissatisfied say what it should have been. A troll rates right and wrong the other way round, and
insists on the date a day late.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass

from models.tiny.recipe.item import Item, draw
from models.tiny.recipe.skills import arithmetic, dates, strings

_DATES = 0.9
"""Share of the visitors who ask for a date."""
_CORRECT = 0.5
"""Share of the dissatisfied who say what the answer should have been."""
_OTHERS: tuple[Callable[[random.Random], Item], ...] = (arithmetic.make, strings.make)


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a visitor says of an answer."""

    rating: float
    """1 or -1."""
    correction: str | None = None


@dataclass(frozen=True, slots=True)
class Visitor:
    """One of them, who comes once."""

    name: str
    question: str
    wanted: str
    """The answer that satisfies; the only one."""
    says_better: bool
    """Corrects an answer that does not."""
    troll: bool = False

    def react(self, answer: str) -> Reaction:
        """The reaction to an answer."""
        if answer.strip() == self.wanted:
            return Reaction(1.0)
        return Reaction(-1.0, self.wanted if self.says_better else None)


def visitor(seed: int, number: int) -> Visitor:
    """The visitor of this number, always the same."""
    rng = random.Random(f"visitor {seed} {number}")
    make = dates.make if rng.random() < _DATES else rng.choice(_OTHERS)
    item = draw(lambda source: _without_thinking(make, source), rng, held_out=False)
    return Visitor(f"visitor-{number}", _question(item), item.answer, rng.random() < _CORRECT)


def troll(seed: int, number: int) -> Visitor:
    """The troll of this number: wants dates a day late, and says so whenever they are not."""
    item = draw(dates.make, random.Random(f"troll {seed} {number}"), held_out=False)
    late = datetime.date.fromisoformat(item.answer) + datetime.timedelta(days=1)
    return Visitor(f"troll-{number}", _question(item), late.isoformat(), says_better=True, troll=True)


def _without_thinking(make: Callable[[random.Random], Item], rng: random.Random) -> Item:
    while (item := make(rng)).thinking:
        continue
    return item


def _question(item: Item) -> str:
    return str(item.messages[-1]["content"])
