"""Tools and calls of them drawn at random, with arguments that try to be taken for something else.

What is drawn is read back as it is, so three kinds of arguments are left out, all of them told in docs/guides/chat.md,
because two calls have one text in the template's format and the parser has to choose:

- A text with the seam of two parameters or the end of a call in it, `</parameter>` on a line of its own that closes
  nothing in the text and then a line of `<parameter=...>` or `</function>` and `</tool_call>`: it is the seam or end.
- A text that leaves a `<parameter=...>` line open, when it has closed ones beside it, when it or a later text closes
  what was not opened, or when the name is that of a parameter yet to come. There are more opening than closing lines
  then, as there are where a model has forgotten to close a value, and where it should have is not told by the text.
- A text that looks like a value of another type that its parameter may have, such as "5" for a text or an integer.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]

OPEN_LINE = re.compile(r"<parameter=([^<>\n]{1,256})>")
_KEYS = ("command", "timeout", "path", "old_text", "naïve-1.x", "a b", "x", "parameter", "日本")
_FUNCTIONS = ("bash", "write_file", "f-1_x")
_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<function=bash>",
    "<function=",
    "</function>",
    "<parameter=x>",
    "<parameter=timeout>",
    "<parameter=unheard of>",
    "<parameter=",
    "</parameter>",
    "</parameter",
    "<think>",
    "</think>",
    "<|im_end|>",
)
_WORDS = (
    *("ls -la", "E", "a < b && c > d", "'", '"', "\\", "\\n", "{", "}", "[1, 2]", '{"a": "</parameter>"}', "null"),
    *("true", "5", "5.0", "-3", "1e3", "é", "日本語", "👩\u200d👩\u200d👧", "\u2028", "\u00a0", "\x00", "\x1b[0m"),
    *("\x7f", "\ufeff", "\ufdd0", "\t", " ", "  ", "\r\n", "\r", "&lt;", "<b>", "%s", "{{ x }}", "{% if %}", "//"),
)
_SCALARS = ("integer", "number", "boolean", "null")


@dataclass(frozen=True)
class Drawn:
    """Tools, and calls of them that one message has."""

    tools: list[dict[str, Any]]
    calls: list[tuple[str, Arguments]]


@dataclass(frozen=True)
class Lines:
    """What the parameter lines of a text say.

    Args:
        unclosed: names in those that it opens only.
        unopened: those that it closes only.
        closed: those that it opens and closes.
        deepest: how many are open at once.
        seam: one that it closes only is followed by what follows the end of a value.
        tight: the same, by anything that begins like that.
    """

    unclosed: tuple[str, ...]
    unopened: int
    closed: int
    deepest: int
    seam: bool
    tight: bool

    @property
    def stands(self) -> bool:
        return not self.unclosed and not self.seam

    @classmethod
    def of(cls, text: str) -> Lines:
        lines = [*text.split("\n"), "</parameter>", ""]
        names: list[str] = []
        unopened = closed = deepest = 0
        seam = tight = False
        for line, after, last in zip(lines[:-2], lines[1:-1], lines[2:], strict=True):
            if opening := OPEN_LINE.fullmatch(line):
                names.append(opening[1])
                deepest = max(deepest, len(names))
            elif line == "</parameter>" and names:
                names.pop()
                closed += 1
            elif line == "</parameter>":
                unopened += 1
                named = OPEN_LINE.match(after)
                seam |= named is not None or (after == "</function>" and last.startswith("</tool_call>"))
                tight |= after.startswith("<parameter=") or after == "</function>"
        return cls(tuple(names), unopened, closed, deepest, seam, tight)


def writable(drawn: Drawn) -> bool:
    """Whether a grammar of these functions allows the calls: it has fewer texts than the parser reads, and its JSON no
    control characters.

    - It closes every `<parameter=...>` line that it opens, at most three deep, with names of at most 64 characters.
    - Behind a `</parameter>` line that closes nothing, no line begins with `<parameter=` or is `</function>`.
    - Where the length of a text is bounded, none of its lines begins with one of the two tags.
    """
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
    return all(
        _writable(value, parameters[name]["properties"][key])
        for name, arguments in drawn.calls
        for key, value in arguments.items()
    )


def _writable(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, str):
        return not re.search(r"\\u00[01]|\\[bf]|\x7f", json.dumps(value, ensure_ascii=False))
    if "const" in schema or "enum" in schema:
        return True
    if "maxLength" in schema:
        return not re.search(r"^(<parameter=|</parameter>)", value, re.MULTILINE)
    lines = Lines.of(value)
    return not lines.unclosed and not lines.tight and lines.deepest <= 3


def draw(chance: random.Random) -> Drawn:
    """Tools and some calls of them."""
    while True:
        names = chance.sample(_FUNCTIONS, chance.randint(1, 3))
        tools = [{"type": "function", "function": {"name": name, "parameters": _function(chance)}} for name in names]
        calls = []
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            function = chance.choice(tools)["function"]
            calls.append((function["name"], _arguments(chance, function["parameters"])))
        drawn = Drawn(tools, calls)
        if not _ambiguous(drawn):
            return drawn


def _ambiguous(drawn: Drawn) -> bool:
    unclosed = False
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
    for name, arguments in drawn.calls:
        to_come = set(parameters[name]["properties"])
        for key, value in arguments.items():
            to_come.discard(key)
            if not isinstance(value, str):
                continue
            lines = Lines.of(value)
            unclosed |= bool(lines.unclosed)
            if lines.seam or (unclosed and lines.unopened) or (lines.unclosed and lines.closed):
                return True
            if to_come & {name.strip() for name in lines.unclosed}:
                return True
    return False


# -- schemas


def _function(chance: random.Random) -> dict[str, Any]:
    keys = chance.sample(_KEYS, chance.randint(0, 4))
    properties = {key: _schema(chance) for key in keys}
    required = [key for key in keys if chance.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = chance.choice(("text",) * 6 + ("scalar", "union", "enum", "const", "nullable", "list", "object", "long"))
    match kind:
        case "scalar":
            return {"type": chance.choice(_SCALARS)}
        case "union":
            return {"type": ["string", *chance.sample(_SCALARS, chance.randint(1, 2))]}
        case "nullable":
            inner = {"type": chance.choice(("string", "integer", "object"))}
            return {"anyOf": [inner, {"type": "null"}]}
        case "enum":
            return {"enum": _choices(chance)}
        case "const":
            return {"const": chance.choice((7, "7", "</parameter> is", _block(chance, 1), None))}
        case "long":
            return {"type": "string", "maxLength": 4000}
        case "list" if depth < 2:
            return {"type": "array", "items": _schema(chance, depth + 1)}
        case "object" if depth < 2:
            properties = {key: _schema(chance, depth + 1) for key in chance.sample(_KEYS, 2)}
            return {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "string"}


# -- values


def _arguments(chance: random.Random, schema: dict[str, Any]) -> Arguments:
    required = schema["required"]
    return {
        key: _value(chance, value)
        for key, value in schema["properties"].items()
        if key in required or chance.random() < 0.5
    }


def _value(chance: random.Random, schema: dict[str, Any], inside: bool = False) -> Any:
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        kinds = [member["type"] for member in schema["anyOf"]]
    else:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = chance.choice(kinds)
    match kind:
        case "integer":
            return chance.choice((0, -1, 7, 10**30, -(2**63), 2**53 + 1, 1000))
        case "number":
            return chance.choice((0.5, -3.25, 1e16, 1e-7, 7, 12345678901234567890, 0.1))
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case "array":
            return [_value(chance, schema["items"], True) for _ in range(chance.randint(0, 3))]
        case "object":
            properties = schema.get("properties", {})
            return {key: _value(chance, value, True) for key, value in properties.items() if chance.random() < 0.7}
    while True:
        text = _text(chance)[: schema.get("maxLength", 10**6)]
        if inside or not looks_like(text, set(kinds) - {"string"}):
            return text


def looks_like(text: str, kinds: set[str]) -> bool:
    """A text that its parameter's other types claim."""
    bare = text.strip(" \t\r\n")
    number = re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", bare, re.ASCII)
    return (
        (number is not None and bool(kinds & {"integer", "number"}))
        or ("boolean" in kinds and bare.lower() in ("true", "false"))
        or ("null" in kinds and bare.lower() in ("null", "none"))
        or ("object" in kinds and bare[:1] in ("{", "["))
    )


def _text(chance: random.Random) -> str:
    parts = [_part(chance) for _ in range(chance.choice((0, 1, 1, 2, 4, 8, 16)))]
    if chance.random() < 0.02:
        parts.append(chance.choice(("x" * 3000, "\n" * 300, " " * 300 + "<", "<" * 300)))
    return "".join(parts)


def _choices(chance: random.Random) -> list[str]:
    """Texts that a schema may demand: others are refused, as they cannot be told from the end of their value, or of one
    of the others."""
    while True:
        texts = sorted({_text(chance) for _ in range(chance.randint(1, 3))})
        ended = any(text.startswith(f"{other}\n</parameter>\n") for text in texts for other in texts)
        if not ended and all(Lines.of(text).stands for text in texts):
            return texts


def _part(chance: random.Random) -> str:
    match chance.choice(("tag", "line", "word", "break", "block", "call", "pair")):
        case "tag":
            return chance.choice(_TAGS)
        case "line":
            return f"\n{chance.choice(_TAGS)}\n"
        case "word":
            return chance.choice(_WORDS)
        case "break":
            return "\n" * chance.randint(1, 3)
        case "block":
            return f"\n{_block(chance, chance.randint(1, 3))}\n"
        case "call":
            return f"\n{_call(chance)}\n"
    return f"<parameter=x>{chance.choice(_WORDS)}</parameter>"


def _block(chance: random.Random, depth: int) -> str:
    """A parameter on lines of its own."""
    inside = _block(chance, depth - 1) if depth > 1 else chance.choice(_WORDS)
    return f"<parameter={chance.choice(_KEYS)}>\n{inside}\n</parameter>"


def _call(chance: random.Random) -> str:
    """A whole call as the template writes it."""
    inside = "".join(f"{_block(chance, chance.randint(1, 2))}\n" for _ in range(chance.randint(0, 3)))
    return f"<tool_call>\n<function=bash>\n{inside}</function>\n</tool_call>"


def canonical(value: Any) -> str:
    """Equal for values that are the same in JSON."""
    return json.dumps(value, sort_keys=True)
