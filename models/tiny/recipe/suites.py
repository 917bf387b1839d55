"""Suites of the skills, made of held-out problems: `python -m models.tiny.recipe.suites [--out DIR] [--check]`.

A suite is two files: {skill}.jsonl, an item a line, and {skill}.json with everything else that `POST /v1/eval/suites`
takes. Problems that are asked with thinking on, and replies behind a tool's result, are left out: a suite has one way
to ask and one scorer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tiny.recipe.data import DIRECTORY, SKILLS
from models.tiny.recipe.item import Item, draw
from models.tiny.recipe.skills.tools import parse_calls

SUITES = DIRECTORY / "suites"
ITEMS = 200
_MAX_TOKENS = 96


def _text(item: Item) -> dict[str, Any]:
    return {"expected": item.answer}


def _reply(item: Item) -> dict[str, Any]:
    # Many questions have the same fixed answer, in front of which only a word or two differ.
    return {"expected": item.answer, "group": item.answer}


def _object(item: Item) -> dict[str, Any]:
    return {"expected": item.answer, "json_schema": {"const": json.loads(item.answer)}}


def _calls(item: Item) -> dict[str, Any]:
    kinds = {
        tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in item.tools or ()
    }  # name of a function: its parameters
    calls = [
        {
            "name": name,
            "arguments": {
                key: int(value) if kinds[name][key]["type"] == "integer" else value for key, value in arguments.items()
            },
        }
        for name, arguments in parse_calls(item.answer)
    ]
    return {"tools": item.tools, "expected_tool_calls": calls}


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of a skill's suite."""

    description: str
    scorer: Mapping[str, Any]
    right: Callable[[Item], Mapping[str, Any]]
    """Fields of an item that say what is right."""


_EXACT = {"type": "exact"}
_FORMS: dict[str, _Form] = {
    "arithmetic": _Form("sums, differences, products and word problems", _EXACT, _text),
    "strings": _Form("operations on words, letter by letter", _EXACT, _text),
    "extraction": _Form("facts from a sentence as a JSON object", {"type": "item_schema"}, _object),
    "tools": _Form("the right call of the right function", {"type": "tool_calls"}, _calls),
    "replies": _Form("short polite replies, instructions of the system prompt, memory over turns", _EXACT, _reply),
    "dates": _Form("dates some days before or after another, which the model is bad at", _EXACT, _text),
}


def suite_items(skill: str, count: int = ITEMS) -> list[Item]:
    """Distinct held-out problems that the skill's suite asks, in a fixed order."""
    rng, found = random.Random(f"suite {skill}"), dict[str, Item]()
    while len(found) < count:
        item = draw(SKILLS[skill][0], rng, held_out=True)
        if not item.thinking and (skill != "tools" or item.match is not None):
            found.setdefault(item.key, item)
    return list(found.values())


def suite_files() -> dict[str, str]:
    """Names of all files with their text."""
    files = {}
    for skill, form in _FORMS.items():
        settings = {
            "description": f"Skill of models/tiny: {form.description}. Problems that its training never saw.",
            "scorer": form.scorer,
            "sampling": {"max_tokens": _MAX_TOKENS},
            "chat_template_kwargs": {"enable_thinking": False},
        }
        rows = [{"messages": item.messages, **form.right(item)} for item in suite_items(skill)]
        files[f"{skill}.json"] = json.dumps(settings, indent=2) + "\n"
        files[f"{skill}.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return files


def main() -> None:
    """Writes the files, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=SUITES)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    for name, text in suite_files().items():
        path: Path = options.out / name
        if not options.check:
            path.write_text(text, encoding="utf-8", newline="\n")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path} is not what the recipe makes: run python -m models.tiny.recipe.suites")


if __name__ == "__main__":
    main()
