"""Compaction: a conversation that nears the model's context is made shorter, and stays one that can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FULL = 0.8
"""Share of the context from which a conversation is compacted."""
_KEPT_RESULTS = 2
_SHORT = 400
"""Characters that are left of an old result."""
_NOTE = "[shortened: this was an earlier result]"
_ASK = (
    "Summarise this work so far for whoever continues it: the task, what was found out, what was changed, and what is "
    "still to be done. Names of files, numbers and commands as they are."
)


@dataclass(frozen=True, slots=True)
class Compaction:
    """Makes conversations shorter.

    Args:
        context: tokens that the model takes.
        summarise: answers a prompt with a text of at most a number of tokens; empty: it cannot.
    """

    context: int
    summarise: Callable[[str, int], str]

    def needed(self, tokens: int) -> bool:
        """Whether a conversation of this many tokens is too near to the context."""
        return tokens > FULL * self.context

    def compacted(self, turns: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
        """A shorter conversation, whose last question and its latest results are as they were.

        First old results of tools lose their middle. If that is not half of what there was, what is before the last
        question becomes a summary; where nothing is, what was done for it before its latest results.

        Args:
            tokens: of all of them, for the worth of a character.
        """
        size = _characters(turns)
        worth = tokens / max(1, size)
        shorter = _short_results(turns)
        if _characters(shorter) <= size / 2:
            return shorter
        last = max((place for place, turn in enumerate(turns) if turn["role"] == "user"), default=0)
        kept = last + 1 if last else _latest(turns)
        before = turns[:last] or turns[1:kept]
        if not before:
            return shorter
        most = int(self.context / 2 / max(worth, 1e-6))
        text = "\n\n".join(_transcript(turn) for turn in before)
        summary = self.summarise(f"{_cut(text, most)}\n\n{_ASK}", self.context // 8) or _cut(text, most // 4)
        question = f"Summary of our work so far:\n{summary}\n\n{turns[last]['content']}"
        return [{"role": "user", "content": question}, *shorter[kept:]]


def _cut(text: str, most: int) -> str:
    """A text of at most so many characters: its beginning, and more of its end."""
    return text if len(text) <= most else f"{text[: most // 4]}\n[…]\n{text[-(most - most // 4) :]}"


def _latest(turns: Sequence[dict[str, Any]]) -> int:
    """Place of the answer whose calls, with those behind it, have the results that are kept: no call is parted from its
    result."""
    results = 0
    for place in range(len(turns) - 1, 0, -1):
        results += turns[place]["role"] == "tool"
        if results >= _KEPT_RESULTS and turns[place]["role"] == "assistant":
            return place
    return 1


def _short_results(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    results = [place for place, turn in enumerate(turns) if turn["role"] == "tool"]
    old = set(results[:-_KEPT_RESULTS])
    return [
        {**turn, "content": f"{turn['content'][:_SHORT]}\n{_NOTE}"}
        if place in old and len(turn["content"]) > _SHORT + len(_NOTE) + 1
        else turn
        for place, turn in enumerate(turns)
    ]


def _characters(turns: Sequence[dict[str, Any]]) -> int:
    return sum(len(_transcript(turn)) for turn in turns)


def _transcript(turn: dict[str, Any]) -> str:
    """A turn as text."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in turn.get("tool_calls") or ()]
    said = turn.get("content") or ""
    return f"{turn['role']}: {said if isinstance(said, str) else json.dumps(said)} {' '.join(calls)}".rstrip()
