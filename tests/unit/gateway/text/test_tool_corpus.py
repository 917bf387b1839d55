"""Tool calls are read the same whole and in any pieces, and nothing that a model wrote is lost."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest

from services.common.text.output_parser import ChatParser, Delta, TextDelta
from services.gateway.text.detokenizer import TextAssembler
from tests.unit.gateway.tool_corpus import CORPUS, TOOLS, Case

LIMIT = 600
"""Longer cases are split at a sample of their bytes."""

MARKUP = {"tool", "call", "function", "parameter", "think", "name", "arguments", "parameters"}
MARKUP |= {"None", "False", "NULL"}  # written as JSON


class Slices:
    """A vocabulary whose tokens are slices of one text's bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def visible_bytes(self, token: slice) -> bytes:
        return self._raw[token]


def read(raw: bytes, cuts: list[int], *, complete: bool = True) -> tuple[str, str, list[list[str]]]:
    """Content, reasoning and calls of a text that arrives in pieces."""
    assembler = TextAssembler(Slices(raw))  # type: ignore[arg-type]
    parser = ChatParser(thinking=False, tools=TOOLS)
    deltas: list[Delta] = []
    edges = [0, *cuts, len(raw)]
    for start, end in itertools.pairwise(edges):
        assembler.push(slice(start, end))  # type: ignore[arg-type]
        deltas += parser.feed(assembler.take().text)
    deltas += parser.feed(assembler.take(final=True).text)
    deltas += parser.finish(complete=complete)
    return joined(deltas)


def joined(deltas: list[Delta]) -> tuple[str, str, list[list[str]]]:
    content, reasoning = [], []
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            (reasoning if delta.reasoning else content).append(delta.text)
            continue
        if delta.name is not None:
            assert delta.call_id
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        assert delta.index == len(calls) - 1
        calls[-1][1] += delta.arguments
    return "".join(content), "".join(reasoning), calls


def loads(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def ids(case: Case) -> str:
    return re.sub(r"\W+", " ", case.text)[:40]


def test_size() -> None:
    assert len({case.text for case in CORPUS}) >= 200


@pytest.mark.parametrize("case", CORPUS, ids=ids)
def test_split_at_every_byte(case: Case) -> None:
    raw = case.text.encode()
    whole = read(raw, [])
    content, reasoning, calls = whole
    if case.content is not None:
        assert content == case.content
    if case.calls is not None:
        assert [(name, loads(arguments)) for name, arguments in calls] == case.calls
    for _, arguments in calls:
        assert isinstance(loads(arguments), dict)
    escaped = [json.dumps(loads(arguments)) for _, arguments in calls]
    kept = "\n".join([content, reasoning, *(part for call in calls for part in call), *escaped])
    for word in re.findall(r"[^\W_]+", case.text):
        integer = re.fullmatch(r"\d+(e\d*)?", word, re.IGNORECASE)  # 1e3 is written as 1000
        assert word in kept or word in MARKUP or (calls and integer)
    if not calls and not reasoning:
        assert content == case.text
    chance = random.Random(len(raw))
    places = range(1, len(raw)) if len(raw) <= LIMIT else sorted(chance.sample(range(1, len(raw)), 40))
    for place in places:
        assert read(raw, [place]) == whole, place
    assert read(raw, list(range(1, len(raw)))) == whole, "byte by byte"
    for _ in range(8):
        cuts = sorted(chance.sample(range(1, len(raw)), min(len(raw) - 1, chance.randint(2, 12)))) if raw else []
        assert read(raw, cuts) == whole, cuts
    # Cut off by max_tokens.
    assert read(raw, list(range(1, len(raw))), complete=False) == read(raw, [], complete=False)


def test_a_long_text_is_streamed_while_it_is_written() -> None:
    parser = ChatParser(thinking=False, tools=TOOLS)
    deltas = parser.feed("<tool_call>\n<function=f>\n<parameter=s>\n")
    assert [delta.name for delta in deltas if not isinstance(delta, TextDelta)] == ["f", None]
    longest_wait = 0
    written = "line of a file <with> tags &\n" * 40
    waited, arguments = 0, ""
    for character in written:
        pieces = [delta.arguments for delta in parser.feed(character) if not isinstance(delta, TextDelta)]
        waited = 0 if pieces else waited + 1
        longest_wait = max(longest_wait, waited)
        arguments += "".join(pieces)
    assert longest_wait <= 2, "characters held back"
    deltas = parser.feed("\n</parameter>\n</function>\n</tool_call>")
    arguments = '{"s": ' + arguments + "".join(d.arguments for d in deltas if not isinstance(d, TextDelta))
    assert json.loads(arguments) == {"s": written}


def test_nothing_is_announced_before_it_is_certain() -> None:
    parser = ChatParser(thinking=False, tools=TOOLS)
    assert parser.feed("ok <tool_call>\n<function=f>\n") == [TextDelta("ok")]
    assert joined(parser.feed("no call"))[0] == " <tool_call>\n<function=f>\nno call"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>{" * 20_000,
        '<tool_call>{"' * 20_000,
        "<tool_call>\n<function=f>\n<parameter=s>\n" + "<" * 200_000,
        "<tool_call>\n<function=f>\n<parameter=s>\n" + "</parameter>\n" * 20_000,
        "<tool_call>\n<function=f>\n<parameter=s>\n" + "</function>\n</tool_call>\n" * 5_000,
        "<tool_call>\n<function=f>\n<parameter=s>\n" + "<parameter=u>\nx\n</parameter>\n" * 2_000,
        "<tool_call>\n<function=f>\n<parameter=s>\nx</parameter>" * 2_000,
        "<tool_call>\n<function=f>\n<parameter=s>\n<parameter=t>\n" * 2_000,
        "<tool_call>\n<function=f>\n<parameter=o>\n" + "\n" * 200_000,
        "x" + "\n" * 200_000,
    ],
    ids=lambda text: re.sub(r"\W+", " ", text)[:30],
)
def test_time_grows_with_the_text(text: str) -> None:
    parser = ChatParser(thinking=False, tools=TOOLS)
    steps = 0
    for start in range(0, len(text), 40):
        steps += 1
        parser.feed(text[start : start + 40])
        assert len(parser._buffer) <= 300, "what is held back is bounded"
    parser.finish(complete=True)
    assert steps == -(-len(text) // 40)
