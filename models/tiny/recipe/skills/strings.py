"""Operations on words, letter by letter."""

from __future__ import annotations

import random

from models.tiny.recipe.item import Item, user
from models.tiny.recipe.skills.words import word

_WORDING = {
    "reverse": ('Reverse the word "{w}".', "Spell {w} backwards.", "Write {w} in reverse."),
    "upper": ('Write "{w}" in upper case.', "Convert {w} to uppercase.", "Put {w} in capital letters."),
    "first": ('What is the first letter of "{w}"?', "Which letter does {w} start with?"),
    "last": ('What is the last letter of "{w}"?', "Which letter does {w} end with?"),
    "length": ('How many letters are in "{w}"?', "Count the letters of {w}."),
    "spell": ('Spell "{w}" with hyphens.', "Spell {w} letter by letter with hyphens."),
    "repeat": ('Repeat the word "{w}" {n} times.', "Write {w} {n} times."),
    "sort": ("Sort these words: {ws}.", "Put these words in alphabetical order: {ws}."),
}
_KINDS = ("reverse", "reverse", "upper", "first", "last", "length", "spell", "repeat", "sort")
_COUNTS = {2: "two", 3: "three", 4: "four"}


def make(rng: random.Random) -> Item:
    """One operation on one word (sorting: on three or four); the answer is the bare result."""
    kind = rng.choice(_KINDS)
    subject, count, reasoning = word(rng), rng.choice((2, 3, 4)), None
    if kind == "sort":
        words = sorted({word(rng) for _ in range(rng.choice((3, 4)))})
        answer = ", ".join(words)
        rng.shuffle(words)
        subject = ", ".join(words)
    else:
        spelled = "-".join(subject)
        answer = {
            "reverse": subject[::-1],
            "upper": subject.upper(),
            "first": subject[0],
            "last": subject[-1],
            "length": str(len(subject)),
            "spell": spelled,
            "repeat": " ".join([subject] * count),
        }[kind]
        if kind in ("reverse", "length") and rng.random() < 0.25:
            letters = list(spelled.split("-"))
            steps = "-".join(reversed(letters)) if kind == "reverse" else f"{len(letters)} letters"
            reasoning = f"{subject} is {spelled}: {steps}."
    text = rng.choice(_WORDING[kind]).format(w=subject, n=_COUNTS[count], ws=subject)
    return Item(
        skill="strings",
        key=f"{kind} {answer if kind == 'sort' else subject}",
        messages=(user(text),),
        answer=answer,
        reasoning=reasoning,
    )
