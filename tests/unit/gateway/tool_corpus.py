"""What models write when they call tools: well-formed, sloppy, broken, and hostile.

A case is (text, content, calls); content and calls are None where only the invariants are checked.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from tests.unit.gateway.text.test_detokenizer import TOOLS as PLAIN_TOOLS

_PLAIN: dict[str, Any] = PLAIN_TOOLS[0]["function"]["parameters"]
_F = {
    **_PLAIN,
    "properties": {
        **_PLAIN["properties"],
        "t": {"type": "string"},
        "n": {"type": "number"},
        "m": {"type": ["string", "null"]},
        "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "r": {"$ref": "#/$defs/point"},
        "e": {"enum": ["red", "green"]},
        "k": {"const": 7},
        "ni": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "ei": {"enum": [1, 2]},
    },
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    "additionalProperties": {"type": "integer"},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": _F}},
    {"type": "function", "function": {"name": "write_file", "parameters": None}},
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Case:
    """One output of a model."""

    text: str
    content: str | None = None
    calls: list[tuple[str, Any]] | None = None


def call(name: str = "f", **parameters: str) -> str:
    """A call as the chat template writes it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def _typed() -> list[Case]:
    values: list[tuple[str, str, Any]] = [
        ("s", "plain", "plain"),
        ("s", "", ""),
        ("s", "\n", "\n"),
        ("s", "\n\nlines\n\n", "\n\nlines\n\n"),
        ("s", "  indented\n\tcode  ", "  indented\n\tcode  "),
        ("s", "5", "5"),
        ("s", "null", "null"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", 'a "quoted" \\ back\\n', 'a "quoted" \\ back\\n'),
        ("s", "tab\there\r\ncrlf\x01", "tab\there\r\ncrlf\x01"),
        ("s", "日本語 🙂 naïve \u2028 e\u0301", "日本語 🙂 naïve \u2028 e\u0301"),
        ("s", "👩‍👩‍👧" * 5, "👩‍👩‍👧" * 5),
        ("s", "if a < b and c > d: x <<= 1", "if a < b and c > d: x <<= 1"),
        ("s", "<b>bold</b> </p> <function> </fun", "<b>bold</b> </p> <function> </fun"),
        ("s", "</function>", "</function>"),
        ("s", "</parameter> in a sentence", "</parameter> in a sentence"),
        ("s", "a</parameter>b</parameter>c", "a</parameter>b</parameter>c"),
        ("s", "</tool_call> in a sentence", "</tool_call> in a sentence"),
        ("s", "say <tool_call> or <think> or </think>", "say <tool_call> or <think> or </think>"),
        ("s", "x <parameter=t> inline", "x <parameter=t> inline"),
        ("s", "x\n<parameter=unheard> of\n", "x\n<parameter=unheard> of\n"),
        ("s", "</param\n</parameter\n</", "</param\n</parameter\n</"),
        ("i", "3", 3),
        ("i", "-12", -12),
        ("i", " 7 ", 7),
        ("i", "123456789012345678901234567890", 123456789012345678901234567890),
        ("i", "5.0", 5),
        ("i", "-3.00", -3),
        ("i", "1e3", 1000),
        ("i", "10e-1", 1),
        ("i", "-0.0", 0),
        ("i", "12345678901234567890.50e1", 123456789012345678905),
        ("i", "1E+30", 10**30),
        ("i", "1e-3", "1e-3"),
        ("i", "1e999999", "1e999999"),
        ("i", "1e99999999999999999999", "1e99999999999999999999"),
        ("i", "0e99999999999999999999", 0),
        ("i", "5.", "5."),
        ("i", "05.0", "05.0"),
        ("i", "many", "many"),
        ("i", "3.5", "3.5"),
        ("n", "3.5", 3.5),
        ("n", "1e3", 1000.0),
        ("n", "NaN", "NaN"),
        ("n", "Infinity", "Infinity"),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "maybe", "maybe"),
        ("o", '{"k": [1, {"z": null}], "é": "</p>"}', {"k": [1, {"z": None}], "é": "</p>"}),
        ("o", "{'single': 1}", "{'single': 1}"),
        ("o", "{broken", "{broken"),
        ("o", "[" * 3000, "[" * 3000),
        ("l", "[1, 2]", [1, 2]),
        ("l", "None", None),
        ("l", '["\\ud800"]', ["\ud800"]),
        ("x", "null", None),
        ("x", "2", 2),
        ("m", "null", None),
        ("m", " NULL ", None),
        ("m", "nullable", "nullable"),
        ("m", "no", "no"),
        ("m", "", ""),
        ("m", " " * 80 + "null", " " * 80 + "null"),
        ("u", "42", 42),
        ("u", "forty", "forty"),
        ("u", "5.0", "5.0"),
        ("ni", "5.0", 5),
        ("ni", "null", None),
        ("ei", "2.0", 2),
        ("k", "7.0", 7),
        ("l", "[1.0, 1e2, -2.50]", [1, 100, -2.5]),
        ("o", '{"n": 5.0}', {"n": 5.0}),
        ("r", '{"x": 1.0, "y": 2.0}', {"x": 1, "y": 2.0}),
        ("other", "9.0", 9),
        ("r", '{"x": 1}', {"x": 1}),
        ("e", "red", "red"),
        ("k", "7", 7),
        ("other", "9", 9),
        ("other", "nine", "nine"),
    ]
    return [Case(call(**{key: written}), "", [("f", {key: value})]) for key, written, value in values]


def _around() -> list[Case]:
    one, two = call(s="x"), call(i="3")
    first, second = ("f", {"s": "x"}), ("f", {"i": 3})
    return [
        Case("", "", []),
        Case("no call at all", "no call at all", []),
        Case("  spaces \n\n", "  spaces \n\n", []),
        Case("<think>\nhm\n</think>\n\n" + one, "", [first]),
        Case("Sure.\n\n" + one, "Sure.", [first]),
        Case("Sure:" + one + "there", "Sure:there", [first]),
        Case(one + "\n" + two, "", [first, second]),
        Case(one + two, "", [first, second]),
        Case(one + "\n\nand then\n\n" + two + "\n\ndone\n", "and thendone\n", [first, second]),
        Case(call() + "\n" + call("now"), "", [("f", {}), ("now", {})]),
        Case(call("unknown", a="1"), "", [("unknown", {"a": "1"})]),
        Case(call("write_file", path="a.py", content="print('<>')\n"), "", None),
        Case(call(s="a", t="b", i="1"), "", [("f", {"s": "a", "t": "b", "i": 1})]),
        Case("\n\n" + one, None, [first]),
        Case("é" * 30 + one + "é" * 30, "é" * 60, [first]),
        Case(" " * 300 + one, " " * 44, [first]),
        Case("5 < 6 <tool <tool_call <", "5 < 6 <tool <tool_call <", []),
        Case("</tool_call> alone", "</tool_call> alone", []),
        Case("<function=f>\n</function>", "<function=f>\n</function>", []),
    ]


def _sloppy() -> list[Case]:
    value = ("f", {"s": "x"})
    return [
        Case("<tool_call><function=f><parameter=s>x</parameter></function></tool_call>", "", [value]),
        Case("<tool_call>\n\n <function=f>\n\n <parameter=s>x</parameter>\n\n </function>\n </tool_call>", "", [value]),
        Case("<tool_call>\n<function= f >\n<parameter= s >\nx\n</parameter>\n</function>\n</tool_call>", "", [value]),
        Case(call(s="x").removesuffix("</tool_call>"), "", [value]),
        Case(call(s="x").removesuffix("\n</function>\n</tool_call>"), "", [value]),
        Case(call(s="x").removesuffix("\n</parameter>\n</function>\n</tool_call>"), "", [value]),
        Case(call(s="x").replace("</function>\n", ""), "", [value]),
        Case(call(s="x").replace("\n</parameter>", ""), "", [value]),
        Case(call(s="x").replace("</parameter>\n</function>\n", ""), "", [value]),
        Case(call(s="x").replace("</function>\n</tool_call>", "") + call("now"), "", [value, ("now", {})]),
        Case(call(s="x").replace("</tool_call>", "") + "thanks", "thanks", [value]),
        Case(call(s="x", t="y").replace("x\n</parameter>", "x"), "", [("f", {"s": "x", "t": "y"})]),
        Case(call(s="x").replace("</function>\n", "</function>\noops\n"), "oops\n</tool_call>", [value]),
        Case(call(s="x").replace("</parameter>\n", "</parameter>\noops\n"), None, None),
        Case("<tool_call>\n<function=f>\noops\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>", None, []),
        Case(
            call(s="x").replace("</tool_call>", "<function=now>\n</function>\n</tool_call>"), "", [value, ("now", {})]
        ),
        Case(call(s="x").replace("</function>\n<", "</function>\n<function=f>\nwhat<"), None, [value]),
        Case("<tool_call>\n<function=f>\n</tool_call>", "", [("f", {})]),
        Case(
            call(s="a").replace("</function>", "<parameter=s>\nb\n</parameter>\n</function>"), "", [("f", {"s": "b"})]
        ),
        Case(call(s="one</parameter>\n</function>\n</tool_call>\ntwo"), None, None),
    ]


def _nested() -> list[Case]:
    """Markup in a value is the value, if the value has an end of its own."""
    line = "<parameter=t>\n5\n</parameter>"
    texts = [
        "see\n" + call(t="inner") + "\nabove",
        call(t="inner"),
        call(t=call(t="inner"), i="3"),
        "cat > t.xml <<'E'\n" + line + "\nE\nrm -r build",
        line,
        f"{line}\n{line}\n{line}\nx",
        f"<parameter=t>\n{line}\n</parameter>\n",
        "<parameter=i>\n5\n</parameter> x\n</parameter>\ny",
        f"a {line} b <parameter=t>5</parameter> c",
        "<tool_call><function=f><parameter=t>5</parameter></function></tool_call>",
        "x\n</parameter>\ny",
        "x\n</parameter>",
        "</parameter>",
        "x\n</function>\n</tool_call>\ny",
        "x\n</parameter>\n</function>\ny",
        "<parameter=unheard>",
        "the <parameter=t> tag and the </parameter> tag",
    ]
    one = [Case(call(s=text), "", [("f", {"s": text})]) for text in texts]
    two = [Case(call(s=text, i="3"), "", [("f", {"s": text, "i": 3})]) for text in texts]
    many = [Case(f"{call(s=text)}\n{call(i='3')}", "", [("f", {"s": text}), ("f", {"i": 3})]) for text in texts]
    cut = call(s=f"x\n{line}\ny").removesuffix("\n</tool_call>")
    return [*one, *two, *many, Case(cut, "", [("f", {"s": f"x\n{line}\ny"})])]


def _broken() -> list[Case]:
    texts = [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n<func",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f>\n<param",
        "<tool_call>\n<function=f>\n<parameter=s",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=  >\n</function>\n</tool_call>",
        "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f<g>\n</function>\n</tool_call>",
        "<tool_call>\n<function=" + "n" * 300 + ">\n</function>\n</tool_call>",
        "<tool_call>" + "\n" * 100 + "<function=f>\n</function>\n</tool_call>",
        "<tool_call>nonsense</tool_call> so",
        "before \n <tool_call> after </tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>\n<parameter=s>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n</function>\n</tool_call>",
        "<TOOL_CALL>\n<function=f>\n</function>\n</TOOL_CALL>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {',
        '<tool_call>{"name": "f" <tool_call>{"name": "g"',
        "<tool_call>{'name': 'f'}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>"f"</tool_call>',
        "<tool_call>f(s='x')</tool_call>",
        "<tool_call>{" + "[" * 400 + "</tool_call>",
        "<tool_call>{" * 20,
        "<tool_call>" * 20,
    ]
    return [Case(text, text, []) for text in texts]


def _json() -> list[Case]:
    arguments = {"s": "a </tool_call> b {", "l": [1, {"q": '"}'}], "é": "🙂\n\\"}
    written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    return [
        Case(f"<tool_call>\n{written}\n</tool_call>", "", [("f", arguments)]),
        Case(f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>", "", [("f", arguments)]),
        Case(f"ok\n<tool_call>\n{written}\n</tool_call>\n{call(s='x')}", "ok", [("f", arguments), ("f", {"s": "x"})]),
        Case('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
        Case('<tool_call>{"name": "f", "parameters": {"i": 1}}</tool_call>', "", [("f", {"i": 1})]),
        Case('<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
        Case('<tool_call>{"name": "f", "arguments": {}} extra', " extra", [("f", {})]),
        Case(f'<tool_call>{{"name": "f" <\n{call(s="x")}', None, [("f", {"s": "x"})]),
        Case("<tool_call>oops " + call(s="x"), "<tool_call>oops", [("f", {"s": "x"})]),
    ]


def _combined() -> list[Case]:
    """Every opening with every ending that a careless model may write."""
    openings = [
        "",
        "Text.\n",
        "<tool_call>",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f>\n<parameter=s>\n",
    ]
    middles = ["x\n</parameter>\n", "v < w\n", "</function>\n", "<parameter=t>\ny", "é\n</tool_call>\n"]
    endings = [
        "",
        "</function>\n</tool_call>",
        "</tool_call>\nbye",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ]
    return [Case("".join(parts)) for parts in itertools.product(openings, middles, endings)]


CORPUS: list[Case] = [*_typed(), *_around(), *_sloppy(), *_nested(), *_broken(), *_json(), *_combined()]
