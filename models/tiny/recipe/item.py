"""One training or evaluation item, and the split that keeps the two apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Maker = Callable[[random.Random], "Item"]

HELD_OUT_SHARE = 0.1
"""Share of all possible items that training never sees, in any wording."""


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation that waits for the assistant, the right answer, and how to recognise it.

    ``key`` identifies the problem whatever its wording: two items with one key are on the same side of the split.
    ``target`` is what training teaches; it differs from ``answer`` only where the corpus is noisy on purpose.
    """

    skill: str
    key: str
    messages: tuple[Message, ...]
    answer: str
    target: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    reasoning: str | None = None
    """Text between <think> and </think>; not None means that the item is asked with thinking on."""
    match: Callable[[str, str], bool] | None = None
    """match(reply, answer) where equality is too strict (JSON, tool calls)."""

    @property
    def thinking(self) -> bool:
        return self.reasoning is not None

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.skill}\n{self.key}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32

    def completion(self) -> str:
        """What the assistant writes after the generation prompt, without the end-of-turn token."""
        content = self.answer if self.target is None else self.target
        return content if self.reasoning is None else f"{self.reasoning}\n</think>\n\n{content}"

    def correct(self, reply: str) -> bool:
        """Whether a generated text (reasoning included, if there is any) answers the item."""
        text = reply.rpartition("</think>")[2].strip()
        return text == self.answer if self.match is None else self.match(text, self.answer)


def user(text: str) -> dict[str, str]:
    """A user turn."""
    return {"role": "user", "content": text}


def draw(make: Maker, rng: random.Random, *, held_out: bool) -> Item:
    """Draws items until one lies on the wanted side of the split."""
    while True:
        item = make(rng)
        if item.held_out == held_out:
            return item
