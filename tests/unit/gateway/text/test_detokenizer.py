"""Detokenizing, stop strings, reasoning and tool calls: however the tokens arrive, the result is the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.text.output_parser import ChatParser, TextDelta
from services.common.text.tool_calls.parameter_types import signatures
from services.common.text.tool_calls.parser import ToolDelta
from services.gateway.text.detokenizer import TextAssembler, Vocabulary
from tests.unit.gateway.tokens import codec

VOCABULARY = Vocabulary(codec())
TOKENS = st.lists(st.integers(0, 271), max_size=60)
BYTES = st.text(alphabet="aé🙂<>/STOP\n", max_size=40).map(lambda text: list(text.encode()))


def assemble(tokens: list[int], stop: list[str], *, step: int, min_tokens: int = 0) -> tuple[str, list[str], list[int]]:
    assembler = TextAssembler(VOCABULARY, stop=stop, min_tokens=min_tokens)
    pieces, entries = [], []
    for start in range(0, len(tokens), step):
        for position, token in enumerate(tokens[start : start + step]):
            assembler.push(token, start + position)
        piece = assembler.take(final=start + step >= len(tokens))
        pieces.append(piece.text)
        entries += piece.entries
    return "".join(pieces), pieces, entries


@settings(max_examples=200, deadline=None)
@given(tokens=st.one_of(TOKENS, BYTES), step=st.integers(1, 7))
def test_text_is_the_decoded_bytes(tokens: list[int], step: int) -> None:
    text, _, entries = assemble(tokens, [], step=step)
    assert text == b"".join(map(VOCABULARY.visible_bytes, tokens)).decode("utf-8", "replace")
    assert entries == list(range(len(tokens)))


@settings(max_examples=200, deadline=None)
@given(
    tokens=BYTES, step=st.integers(1, 7), stop=st.lists(st.sampled_from(["STOP", "SS", "é", "OP\n", "🙂a"]), max_size=3)
)
def test_stop_strings(tokens: list[int], step: int, stop: list[str]) -> None:
    whole = bytes(tokens).decode("utf-8", "replace")
    one_by_one, _, _ = assemble(tokens, stop, step=1)
    text, pieces, entries = assemble(tokens, stop, step=step)
    ends = [whole.find(s) + len(s) for s in stop if s in whole]
    if not ends:
        assert text == whole
    else:
        assert all(s not in text for s in stop)
        assert whole.startswith(text)
        assert whole[len(text) :].startswith(tuple(stop))
    assert text == one_by_one or step > 1
    assert all(entry < len(tokens) for entry in entries)
    assert "".join(pieces) == text


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    assembler = TextAssembler(VOCABULARY, stop=["STOP"])
    shown = ""
    for token in b"abST":
        assembler.push(token)
        shown += assembler.take().text
    assert shown == "ab"
    for token in b"Oh":
        assembler.push(token)
        shown += assembler.take().text
    assert shown == "abSTOh"


def test_incomplete_characters_are_held() -> None:
    assembler = TextAssembler(VOCABULARY)
    shown = []
    for token in "🙂".encode():
        assembler.push(token)
        shown.append(assembler.take().text)
    assert shown == ["", "", "", "🙂"]


def parse(text: str, *, step: int, thinking: bool = False, tools: list[dict] | None = None, complete: bool = True):
    parser = ChatParser(thinking=thinking, tools=tools or [])
    deltas = []
    for start in range(0, len(text), step):
        deltas += parser.feed(text[start : start + step])
    deltas += parser.finish(complete=complete)
    content = "".join(d.text for d in deltas if isinstance(d, TextDelta) and not d.reasoning)
    reasoning = "".join(d.text for d in deltas if isinstance(d, TextDelta) and d.reasoning)
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ToolDelta):
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
    return content, reasoning, calls


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "l": {"type": ["array", "null"]},
                    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
            },
        },
    }
]


def call(**parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


CASES = [
    ("hello", {}, ("hello", "", [])),
    ("  hello\n", {}, ("  hello\n", "", [])),
    ("why\nnot\n</think>\n\nyes\n", {"thinking": True}, ("yes\n", "why\nnot", [])),
    ("<think>\nhm\n</think>\n\nyes", {}, ("yes", "hm", [])),
    ("never ends </thin", {"thinking": True}, ("", "never ends </thin", [])),
    ("a </think> b", {}, ("a </think> b", "", [])),
    ("<think", {}, ("<think", "", [])),
    ("", {}, ("", "", [])),
    (call(s="x"), {}, (call(s="x"), "", [])),
    ("one\n\n" + call(s="a\nb", i="3"), {"tools": TOOLS}, ("one", "", [["f", {"s": "a\nb", "i": 3}]])),
    (
        call(s="5", b="True", o='{"k": [1]}'),
        {"tools": TOOLS},
        ("", "", [["f", {"s": "5", "b": True, "o": {"k": [1]}}]]),
    ),
    (call(l="[1, 2]", x="null"), {"tools": TOOLS}, ("", "", [["f", {"l": [1, 2], "x": None}]])),
    (call(i="many", u="3"), {"tools": TOOLS}, ("", "", [["f", {"i": "many", "u": "3"}]])),
    (call() + "\n" + call(s="</function>"), {"tools": TOOLS}, ("", "", [["f", {}], ["f", {"s": "</function>"}]])),
    ("t\n</think>\n\n" + call(s=""), {"tools": TOOLS, "thinking": True}, ("", "t", [["f", {"s": ""}]])),
    ('<tool_call>\n{"name": "f", "arguments": {"i": 1}}\n</tool_call>', {"tools": TOOLS}, ("", "", [["f", {"i": 1}]])),
    ("<tool_call>nonsense</tool_call> so", {"tools": TOOLS}, ("<tool_call>nonsense</tool_call> so", "", [])),
    ("<tool_call>\n<func", {"tools": TOOLS}, ("<tool_call>\n<func", "", [])),
    (call(s="x").removesuffix("</function>\n</tool_call>"), {"tools": TOOLS}, ("", "", [["f", {"s": "x"}]])),
    ("text \n", {"tools": TOOLS}, ("text \n", "", [])),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES, ids=range(len(CASES)))
def test_chat_text(text: str, options: dict, expected: tuple) -> None:
    for step in range(1, len(text) + 2):
        content, reasoning, calls = parse(text, step=step, **options)
        assert (content, reasoning, [[name, json.loads(arguments)] for name, arguments in calls]) == expected, step


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>"]
PARTS += ["</parameter>", "\n", " ", "a", "{", '"name"', "é"]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(PARTS),
        max_size=14,
    ),
    thinking=st.booleans(),
    tools=st.booleans(),
    complete=st.booleans(),
    step=st.integers(1, 30),
)
def test_pieces_do_not_matter(parts: list[str], thinking: bool, tools: bool, complete: bool, step: int) -> None:
    options = {"thinking": thinking, "tools": TOOLS if tools else [], "complete": complete}
    text = "".join(parts)
    assert parse(text, step=step, **options) == parse(text, step=max(1, len(text)), **options)


@pytest.mark.parametrize(
    "schema", [{"type": [{}]}, {"type": {}}, {"anyOf": 5}, {"oneOf": [{"type": [[]]}]}, {"enum": 3}, [], None]
)
def test_what_is_no_schema_says_nothing(schema: object) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    assert not signatures([tool])["f"].of("a").types


@pytest.mark.parametrize("step", [1, 3, 40])
@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["zz", "END"], "one END two zz", "END"),
        (["ENDE", "END"], "one ENDE", "END"),
        (["abc", "b"], "xabc", "b"),
        (["zz"], "one two z", None),
    ],
)
def test_the_stop_string_that_was_found_is_told(stop: list[str], text: str, found: str | None, step: int) -> None:
    assembler = TextAssembler(VOCABULARY, stop=stop)
    tokens = list(text.encode())
    for start in range(0, len(tokens), step):
        for token in tokens[start : start + step]:
            assembler.push(token)
        assembler.take(final=start + step >= len(tokens))
    assert assembler.stopped_by == found
    assert assembler.stopped is (found is not None)
