"""Whole-number arithmetic: addition and subtraction to three digits, small products, word problems."""

from __future__ import annotations

import random

from models.tiny.recipe.item import Item, user
from models.tiny.recipe.skills.words import name

_SIGN = {"add": "+", "sub": "-", "mul": "*"}
_WORDING = {
    "add": ("What is {a} + {b}?", "{a} + {b} =", "Add {a} and {b}.", "Calculate {a} + {b}.", "What is {a} plus {b}?"),
    "sub": (
        "What is {a} - {b}?",
        "{a} - {b} =",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "What is {a} minus {b}?",
    ),
    "mul": (
        "What is {a} * {b}?",
        "{a} * {b} =",
        "Multiply {a} by {b}.",
        "Calculate {a} x {b}.",
        "What is {a} times {b}?",
    ),
}
_STORIES = {
    "add": (
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
        "There are {a} {t} in one box and {b} in another. How many {t} are there in total?",
    ),
    "sub": (
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "A shop had {a} {t} and sold {b}. How many {t} are left?",
    ),
    "mul": (
        "There are {a} boxes with {b} {t} each. How many {t} are there?",
        "{n} buys {a} bags of {b} {t}. How many {t} is that?",
    ),
}
_THINGS = ["apples", "books", "coins", "pens", "stamps", "eggs", "cards", "shells", "balls", "stickers"]


def _operands(rng: random.Random, kind: str) -> tuple[int, int]:
    if kind == "mul":
        return rng.randint(2, 99), rng.randint(2, 9)
    top = rng.choice((20, 99, 99, 999))
    a, b = rng.randint(0, top), rng.randint(0, top)
    return (max(a, b), min(a, b)) if kind == "sub" else (a, b)


def _reasoning(kind: str, a: int, b: int) -> str:
    """Column arithmetic from the ones up: the working that the answer is read from."""
    lines = []
    if kind == "mul":
        ones, tens = a % 10, a - a % 10
        return f"{ones} * {b} = {ones * b}. {tens} * {b} = {tens * b}. {tens * b} + {ones * b} = {a * b}."
    carry, sign = 0, _SIGN[kind]
    for place in range(len(str(a)) if kind == "sub" else len(str(max(a, b)))):
        da, db = a // 10**place % 10, b // 10**place % 10
        if kind == "add":
            total = da + db + carry
            lines.append(f"{da} {sign} {db} + {carry} = {total}, write {total % 10}, carry {total // 10}.")
            carry = total // 10
        else:
            total = da - db - carry
            lines.append(f"{da} {sign} {db} - {carry} = {total}, write {total % 10}, borrow {int(total < 0)}.")
            carry = int(total < 0)
    return " ".join(lines)


def make(rng: random.Random) -> Item:
    """One problem; the answer is the bare number."""
    kind = rng.choice(("add", "add", "sub", "sub", "mul"))
    a, b = _operands(rng, kind)
    result = {"add": a + b, "sub": a - b, "mul": a * b}[kind]
    stories = rng.random() < 0.2
    wording = rng.choice((_STORIES if stories else _WORDING)[kind])
    text = wording.format(a=a, b=b, n=name(rng), t=rng.choice(_THINGS))
    if not stories and rng.random() < 0.2:
        text += " Answer with the number only."
    low, high = sorted((a, b))
    return Item(
        skill="arithmetic",
        key=f"{kind} {low} {high}",
        messages=(user(text),),
        answer=str(result),
        reasoning=_reasoning(kind, a, b) if rng.random() < 0.15 else None,
    )
