"""Facts from a sentence into a JSON object with the keys that were asked for."""

from __future__ import annotations

import json
import random

from models.tiny.recipe.item import Item, user
from models.tiny.recipe.skills.words import city, name, word

_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_FRAMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("name", "age", "city"),
        (
            "{name} is {age} years old and lives in {city}.",
            "My friend {name} from {city} is {age}.",
            "{name}, {age}, lives in {city}.",
            "At {age}, {name} moved to {city}.",
        ),
    ),
    (
        ("product", "price", "quantity"),
        (
            "We ordered {quantity} of the {product} for {price} dollars each.",
            "The {product} costs {price} dollars and {quantity} are in stock.",
            "{quantity} pieces of {product} at {price} dollars.",
        ),
    ),
    (
        ("event", "day", "city"),
        (
            "The {event} takes place on {day} in {city}.",
            "Come to {city} on {day} for the {event}!",
            "On {day} there is a {event} in {city}.",
        ),
    ),
    (
        ("from", "to", "day"),
        (
            "I fly from {from} to {to} on {day}.",
            "Book me a train to {to} from {from} for {day}.",
            "On {day} we leave {from} and drive to {to}.",
        ),
    ),
    (
        ("name", "email"),
        (
            "You can reach {name} at {email}.",
            "{name} wrote from {email} this morning.",
            "Mail {email} and ask for {name}.",
        ),
    ),
)
_ASK = (
    "Extract {keys} as JSON: {text}",
    "Return a JSON object with {keys}. Text: {text}",
    "{text} Give me {keys} as JSON.",
)


def _value(rng: random.Random, key: str) -> str | int:
    if key in ("age", "quantity"):
        return rng.randint(2, 99)
    if key == "price":
        return rng.randint(1, 499)
    if key in ("city", "from", "to"):
        return city(rng)
    if key == "day":
        return rng.choice(_DAYS)
    if key == "name":
        return name(rng)
    if key == "email":
        return f"{word(rng)}@{word(rng)}.{rng.choice(('com', 'org', 'net'))}"
    return word(rng)


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]


def same_json(reply: str, answer: str) -> bool:
    """Whether both parse to the same value."""
    try:
        return bool(json.loads(reply) == json.loads(answer))
    except ValueError:
        return False


def make(rng: random.Random) -> Item:
    """One sentence; the answer is a JSON object, compared as a value."""
    keys, sentences = rng.choice(_FRAMES)
    values = {key: _value(rng, key) for key in keys}
    text = rng.choice(sentences).format(**values)
    wanted = list(keys)
    if rng.random() < 0.3:
        rng.shuffle(wanted)
    if rng.random() < 0.2:
        wanted = wanted[: rng.randint(1, len(wanted))]
    request = rng.choice(_ASK).format(keys=_listed(wanted), text=text)
    return Item(
        skill="extraction",
        key=text,
        messages=(user(request),),
        answer=json.dumps({key: values[key] for key in wanted}),
        match=same_json,
    )
