"""Answers whose parts are known, for tests of what ends them: reasoning, content and calls, cut into tokens."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

NAME = "f"
TOOLS = [{"type": "function", "function": {"name": NAME, "parameters": {"type": "object", "properties": {}}}}]
ALPHABET = "ab<\n é"


@dataclass
class Told:
    """What a client is told."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments."""
    reason: str = "stop"
    tokens: int = 0


@dataclass(frozen=True)
class Part:
    """A piece of the raw text."""

    kind: str
    """What a client sees it as: "reasoning", "content", "value", or nothing: "markup"."""
    text: str


@dataclass
class Drawn:
    """One answer."""

    parts: list[Part]
    tokens: list[bytes]
    stops: list[str]
    stop_tokens: set[int]
    """Numbers of tokens, from 0."""
    min_tokens: int

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind != "key")


def draw(source: random.Random) -> Drawn:
    """An answer that begins inside of its reasoning, with its stops."""
    parts = [Part("reasoning", _words(source).strip()), Part("markup", "\n</think>\n\n")]
    for _ in range(source.randint(0, 3)):
        # White space next to a tag is markup.
        parts += [Part("content", _words(source).strip()), Part("markup", source.choice(["", "\n", "\n\n"]))]
        parts.append(Part("markup", f"<tool_call>\n<function={NAME}>\n"))
        for key in "xyz"[: source.randint(0, 2)]:
            parts += [Part("key", key), Part("markup", f"<parameter={key}>\n")]
            parts += [Part("value", _words(source)), Part("markup", "\n</parameter>\n")]
        parts.append(Part("markup", "</function>\n</tool_call>" + source.choice(["", "\n"])))
        parts.append(Part("end", ""))
    tail = _words(source).lstrip("\n")
    parts.append(Part("content", tail if tail.strip() else ""))
    raw = Drawn(parts, [], [], set(), 0).text.encode()
    cuts = sorted(source.sample(range(1, len(raw)), source.randint(0, len(raw) - 1)))
    tokens = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stops = [_words(source, 3) or "b" for _ in range(source.randint(0, 3))]
    stops += source.sample(["</think>", "<tool_call>", "parameter", "=x>", "\n", "\n\n", "</"], source.randint(0, 2))
    stop_tokens = {source.randrange(len(tokens)) for _ in range(source.choice([0, 0, 1, 3]))}
    return Drawn(parts, tokens, stops, stop_tokens, source.choice([0, 0, 0, 5, 30]))


def expected(drawn: Drawn) -> Told:
    """What should be told, found character by character."""
    ends, starts = [], []
    raw = b""
    for token in drawn.tokens:
        starts.append(len(raw.decode("utf-8", "ignore")))
        raw += token
        ends.append(len(raw.decode("utf-8", "ignore")))
    counts_from = ends[drawn.min_tokens - 1] if 0 < drawn.min_tokens <= len(ends) else 0
    if drawn.min_tokens > len(ends):
        counts_from = len(drawn.text) + 1
    told, place, keys, open_call = Told(), 0, 0, False
    for part in drawn.parts:
        if part.kind == "key":
            told.calls[-1][1] += f"{', ' if keys else '{'}{json.dumps(part.text)}: "
            keys += 1
            continue
        if part.kind == "end":
            told.calls[-1][1] += "}" if keys else "{}"
            keys, open_call = 0, False
        if part.text.startswith("<tool_call>"):
            told.calls.append([NAME, ""])
            open_call = True
        if part.kind == "reasoning":
            told.reasoning += part.text
        if part.kind in ("content", "value"):
            found = _first_stop(drawn, part.text, place, counts_from, starts, ends)
            kept = part.text if found is None else part.text[: found[0]]
            if part.kind == "content":
                told.content += kept
            elif kept or found is None:
                quoted = json.dumps(kept, ensure_ascii=False)
                told.calls[-1][1] += quoted if found is None else quoted[:-1]
            if found is not None:
                told.tokens = found[1]
                told.reason = "tool_calls" if told.calls and not open_call else "stop"
                return told
        place += len(part.text)
    told.tokens = len(drawn.tokens) + 1
    told.reason = "tool_calls" if told.calls else "stop"
    return told


def _first_stop(
    drawn: Drawn, text: str, place: int, counts_from: int, starts: list[int], ends: list[int]
) -> tuple[int, int] | None:
    """Where in a text that is seen the first stop begins, and how many tokens there are up to it."""
    found: list[tuple[int, int, int]] = []
    for end in range(1, len(text) + 1):
        found += [
            (place + end, end - len(stop), next(n for n, e in enumerate(ends, 1) if e >= place + end))
            for stop in drawn.stops
            if text[:end].endswith(stop) and place + end > counts_from
        ]
    for number in sorted(drawn.stop_tokens):
        begin, end = starts[number], max(ends[number], starts[number] + 1)
        if text and number >= drawn.min_tokens and begin < place + len(text) and end > place:
            found.append((end, max(0, begin - place), number + 1))
    if not found:
        return None
    _, begin, tokens = min(found)
    return begin, tokens


def _words(source: random.Random, most: int = 8) -> str:
    return "".join(source.choice(ALPHABET) for _ in range(source.randint(0, most)))


class Vocabulary:
    """The tokens of one answer; the id of each is its number."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def visible_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def collect(steps: list[Any]) -> Told:
    """What a client puts together."""
    told = Told(reason="")
    for step in steps:
        for delta in step.deltas:
            if getattr(delta, "text", None) is not None:
                if delta.reasoning:
                    told.reasoning += delta.text
                else:
                    told.content += delta.text
                continue
            if delta.name is not None:
                told.calls.append([delta.name, ""])
            told.calls[-1][1] += delta.arguments
        told.tokens += len(step.token_ids)
        told.reason = step.finish_reason or told.reason
    return told
