"""The training mixture and the held-out sets, as items and as text in the chat format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.tiny.recipe.item import Item, Maker, draw
from models.tiny.recipe.skills import arithmetic, dates, extraction, replies, strings, tools

DIRECTORY = Path(__file__).resolve().parents[1]
END = "<|im_end|>"

SKILLS: dict[str, tuple[Maker, float]] = {
    "arithmetic": (arithmetic.make, 0.24),
    "strings": (strings.make, 0.26),
    "extraction": (extraction.make, 0.13),
    "tools": (tools.make, 0.13),
    "replies": (replies.make, 0.12),
    "dates": (dates.make, 0.12),
}
"""Skill: (maker, share of the training items)."""
WEAK_SKILL = "dates"
_WORKED = ("arithmetic", "strings")  # these bring working of their own


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def chat_template() -> jinja2.Template:
    """models/tiny/chat_template.jinja, compiled the way transformers compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string((DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8"))


def prompt_text(item: Item, template: jinja2.Template) -> str:
    """The rendered conversation up to where the assistant starts to write."""
    return template.render(
        messages=item.messages, tools=item.tools, add_generation_prompt=True, enable_thinking=item.thinking
    )


def training_items(seed: str) -> Iterator[Item]:
    """Endless items of the mixture, never a held-out one."""
    rng = random.Random(seed)
    names, shares = list(SKILLS), [share for _, share in SKILLS.values()]
    while True:
        item = draw(SKILLS[rng.choices(names, shares)[0]][0], rng, held_out=False)
        if item.skill not in _WORKED and rng.random() < 0.04:
            item = replace(item, reasoning="I can answer this directly.")
        yield item


def held_out_items(skill: str, count: int, *, seed: int = 0) -> list[Item]:
    """Distinct held-out items of one skill in a fixed order (fewer than ``count`` where the skill has fewer)."""
    rng, found = random.Random(f"held out {skill} {seed}"), dict[str, Item]()
    for _ in range(50 * count):
        item = draw(SKILLS[skill][0], rng, held_out=True)
        found.setdefault(item.key, item)
        if len(found) == count:
            break
    return list(found.values())
