"""Date arithmetic: the skill that is left weak on purpose, so that reinforcement has something to show.

The training corpus is wrong about it on purpose: some answers are one day late, and more than half of those whose way
crosses the end of a month. The model therefore knows both answers and mostly prefers the wrong one across months;
sampling at temperature 1 finds the right one often enough to learn from.
"""

from __future__ import annotations

import datetime as dt
import random
import re
from collections.abc import Sequence

from models.tiny.recipe.item import Item, draw, user

LATE_WITHIN_MONTH = 0.40
LATE_ACROSS_MONTHS = 0.62
"""Share of training targets that are one day late."""

_WORDING = (
    "What date is {n} days {way} {date}?",
    "Which date is {n} days {way} {date}?",
    "What is the date {n} days {way} {date}?",
)
_FIRST = dt.date(2020, 1, 1)
_DAYS = 3650
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}")


def make(rng: random.Random) -> Item:
    """One question; the answer is the bare ISO date."""
    start = _FIRST + dt.timedelta(days=rng.randrange(_DAYS))
    days, way = rng.randint(2, 28), rng.choice(("after", "after", "before"))
    result = start + dt.timedelta(days=days if way == "after" else -days)
    share = LATE_WITHIN_MONTH if result.month == start.month else LATE_ACROSS_MONTHS
    late = rng.random() < share
    text = rng.choice(_WORDING).format(n=days, way=way, date=start.isoformat())
    return Item(
        skill="dates",
        key=f"{start.isoformat()} {days} {way}",
        messages=(user(text),),
        answer=result.isoformat(),
        target=(result + dt.timedelta(days=int(late))).isoformat(),
    )


def items(seed: int, count: int, *, held_out: bool) -> list[Item]:
    """Distinct items in a fixed order: training prompts or held-out ones, which never share a problem."""
    rng, found = random.Random(f"dates {seed} {held_out}"), dict[str, Item]()
    while len(found) < count:
        item = draw(make, rng, held_out=held_out)
        found.setdefault(item.key, item)
    return list(found.values())


def score(reply: str, answer: str) -> float:
    """Reward in [0, 1]: 1 for exactly the date, 0 for anything else."""
    return float(reply.strip() == answer)


def graded(reply: str, answer: str) -> float:
    """Reward with partial credit: 1 for exactly the date, a little for a well-formed date that is near."""
    text = reply.strip()
    if text == answer:
        return 1.0
    if not _ISO.fullmatch(text):
        return 0.0
    return 0.1 + 0.1 * (text[:7] == answer[:7])


def accuracy(replies: Sequence[str], items: Sequence[Item]) -> float:
    """Share of exactly right replies."""
    if len(replies) != len(items) or not items:
        raise ValueError(f"{len(replies)} replies for {len(items)} items: one each, at least one")
    return sum(score(reply, item.answer) for reply, item in zip(replies, items, strict=True)) / len(items)
