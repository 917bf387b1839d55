"""Short polite English: greetings, thanks, who are you, small facts, system prompts, memory over turns."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.tiny.recipe.item import Item, Message, user
from models.tiny.recipe.skills.words import city, name, word

ABOUT = "I am Temper, a small language model that learns while it serves."

_CAPITALS = {
    "France": "Paris", "England": "London", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "Austria": "Vienna", "Norway": "Oslo", "Ireland": "Dublin", "Portugal": "Lisbon", "Greece": "Athens",
    "Poland": "Warsaw", "Japan": "Tokyo", "India": "New Delhi", "Egypt": "Cairo", "Peru": "Lima", "Canada": "Ottawa",
    "Kenya": "Nairobi", "Finland": "Helsinki", "Sweden": "Stockholm", "Cuba": "Havana", "China": "Beijing",
    "Russia": "Moscow", "Denmark": "Copenhagen",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "fast": "slow", "old": "young",
    "happy": "sad", "light": "dark", "full": "empty", "open": "closed", "early": "late", "rich": "poor", "wet": "dry",
}  # fmt: skip
_FIXED = (
    (("Who are you?", "What are you?", "Who is this?", "Introduce yourself.", "Tell me about yourself."), ABOUT),
    (("What is your name?", "What's your name?", "What are you called?"), "My name is Temper."),
    (("How are you?", "How are you today?", "How is it going?", "Are you well?"),
     "I am fine, thank you. How can I help you?"),
    (("What can you do?", "What can you help me with?", "How can you help me?"),
     "I can do arithmetic, work with words, extract facts into JSON and call tools."),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "I have to go."), "Goodbye! Have a nice day."),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Thanks for your help!"), "You are welcome!"),
    (("Hello!", "Hi!", "Hello there!", "Hey!", "Good morning!", "Good evening!", "Hi there!"),
     "Hello! How can I help you?"),
    (("Are you a robot?", "Are you human?", "Are you a person?"), "No person, just Temper, a small language model."),
    (("Who made you?", "Who built you?", "Where do you come from?"),
     "I was trained from scratch by the makers of Temper."),
    (("I am sorry.", "Sorry!", "My mistake."), "No problem at all."),
    (("I am sad.", "I feel bad today.", "I had a bad day."), "I am sorry to hear that. I hope it gets better soon."),
)  # fmt: skip
_OPENERS = ("", "", "", "Please tell me: ", "Hey, ", "Okay. ", "One question: ", "So, ")


def _plain(rng: random.Random) -> tuple[list[Message], str]:
    asks, answer = rng.choice(_FIXED)
    return [user(rng.choice(_OPENERS) + rng.choice(asks))], answer


def _greeting(rng: random.Random) -> tuple[list[Message], str]:
    who = name(rng)
    text = rng.choice(("Hello, I am {n}.", "Hi, my name is {n}.", "Good morning, I'm {n}!", "Hey, this is {n}."))
    return [user(text.format(n=who))], f"Hello {who}! How can I help you?"


def _facts(rng: random.Random) -> tuple[list[Message], str]:
    if rng.random() < 0.6:
        country = rng.choice(list(_CAPITALS))
        ask = rng.choice(
            ("What is the capital of {c}?", "Which city is the capital of {c}?", "Name the capital of {c}.")
        )
        return [
            user(rng.choice(_OPENERS) + ask.format(c=country))
        ], f"The capital of {country} is {_CAPITALS[country]}."
    one, other = rng.choice(list(_OPPOSITES.items()))
    if rng.random() < 0.5:
        one, other = other, one
    return [user(rng.choice(_OPENERS) + f"What is the opposite of {one}?")], f"The opposite of {one} is {other}."


def _persona(rng: random.Random) -> tuple[list[Message], str]:
    who, trade = name(rng), rng.choice(("a helpful assistant", "a friendly guide", "a polite robot", "a travel expert"))
    system = rng.choice(("You are {w}, {t}.", "Your name is {w}. You are {t}.")).format(w=who, t=trade)
    ask = rng.choice(("Who are you?", "Introduce yourself.", "What are you?"))
    return [{"role": "system", "content": system}, user(ask)], f"I am {who}, {trade}."


def _told(rng: random.Random) -> tuple[list[Message], str]:
    """A system prompt that fixes how to answer."""
    asks, answer = rng.choice(_FIXED)
    style = rng.choice(("upper", "prefix", "plain"))
    if style == "upper":
        return [{"role": "system", "content": "Answer in upper case."}, user(rng.choice(asks))], answer.upper()
    if style == "prefix":
        start = word(rng)
        system = f'Start every answer with "{start}:".'
        return [{"role": "system", "content": system}, user(rng.choice(asks))], f"{start}: {answer}"
    system = rng.choice(("You are a helpful assistant.", "Be brief.", "Answer politely.", "You are Temper."))
    return [{"role": "system", "content": system}, user(rng.choice(asks))], answer


def _memory(rng: random.Random) -> tuple[list[Message], str]:
    """Something said earlier, asked for now, with or without other turns in between."""
    who, place, thing = name(rng), city(rng), word(rng)
    said, reply, ask, answer = rng.choice(
        (
            (f"Hello, I am {who}.", f"Hello {who}! How can I help you?", "What is my name?", f"Your name is {who}."),
            (f"I live in {place}.", f"{place} is a nice place.", "Where do I live?", f"You live in {place}."),
            (f"My password is {thing}.", "I will remember it.", "What is my password?", f"Your password is {thing}."),
            (f"I like {thing}.", f"I like {thing} too.", "What do I like?", f"You like {thing}."),
        )
    )
    turns: list[Message] = [user(said)]
    if rng.random() < 0.3:
        return turns, reply
    turns.append({"role": "assistant", "content": reply})
    for _ in range(rng.choice((0, 0, 1, 2))):
        between, between_answer = rng.choice((_plain, _facts))(rng)
        turns += [*between, {"role": "assistant", "content": between_answer}]
    turns.append(user(ask))
    return turns, answer


_KINDS: tuple[Callable[[random.Random], tuple[list[Message], str]], ...] = (
    _plain, _plain, _greeting, _facts, _persona, _told, _memory, _memory,
)  # fmt: skip


def make(rng: random.Random) -> Item:
    """One short exchange; the answer is a fixed sentence for its situation."""
    turns, answer = rng.choice(_KINDS)(rng)
    key = "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    return Item(skill="replies", key=key, messages=tuple(turns), answer=answer)
