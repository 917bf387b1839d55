"""Source of a grammar: a request's constraint as the Lark text that llguidance compiles, with no text forced."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher

from services.common.json_schema.origin import all_needed
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.compiling import grammar_of, parsed
from services.engine.constraints.schema.probe import Probe
from services.engine.constraints.vocabulary import NO_FORCING
from services.engine.requests.sampling_params import Constraint, ConstraintKind

_LITERALS = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"i?            # a string
    | //[^\n]*                       # a comment
    | \#[^\n]*                       # the other kind
    | /(?:\\.|[^/\\\n])+/[imslux]*   # a regular expression
    """,
    re.VERBOSE,
)
_LITERAL_OR_JSON = re.compile(rf"{_LITERALS.pattern} | %json\s*", re.VERBOSE)
_DECODER = json.JSONDecoder()
_NAMED = re.compile(r"<([^>\s]*)>")
_ATTRIBUTES = re.compile(r"\[([^\]\n]*)\]\s*:")
_UNHEARD = re.compile(r"\b(temperature|capture)\b")
_EXCERPT = re.compile(r"\n\s*\d+ \| |<state>|\n?<non-verbose/>")
_PLACE = re.compile(r"(?:\bat )?(\d+)\((\d+)\): ")
_WHERE = re.compile(r"^line \d+, column \d+: ")
_TERMINAL = re.compile(r"[A-Z]\w*: ")
_LONGEST_REASON = 300
_SCHEMA_RULE = "temper-schema-"
_OF_TOOLS = "tools"
"""Request field of grammars that a gateway writes."""


def lark_of(constraint: Constraint, reserved: Mapping[str, int], probe: Probe) -> str:
    """Lark text of a constraint.

    Args:
        reserved: added tokens that no grammar may name.
        probe: answers questions about terminals.

    Raises:
        Refused: the constraint cannot be enforced.
    """
    text = constraint.source[0]
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return grammar_of(parsed(text), probe)
    if constraint.kind is ConstraintKind.REGEX:
        return NO_FORCING + _regex(text)
    if constraint.kind is ConstraintKind.CHOICES:
        return f"{NO_FORCING}start: {' | '.join(_string(choice) for choice in constraint.source)}"
    check_lark(text, reserved)
    _check_needed(text, probe)
    return NO_FORCING + _with_schemas(text, probe)


def _regex(text: str) -> str:
    """Lark of a regular expression. Anchors at both ends are dropped, because it must match the whole output; elsewhere
    they are refused."""
    text = text.removeprefix("^")
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2:
        text = text[:-1]
    grammar = json.loads(LLMatcher.grammar_from_regex(text))
    lark: str = grammar["grammars"][0]["lark_grammar"]
    return lark


def _string(text: str) -> str:
    """String of Lark for a text; Lark reads the escapes of JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("a choice has a lone surrogate, which no output can have") from None
    # The only control character that JSON leaves unescaped and Lark does not accept.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_lark(text: str, reserved: Mapping[str, int]) -> None:
    """Checks a client's Lark grammar.

    Raises:
        Refused: the grammar has a directive for llguidance itself, names reserved tokens, or has attributes without
            effect here.
    """
    if "%llguidance" in text:
        raise Refused("%llguidance directives are set by the engine; leave them out")
    bare = _LITERALS.sub('""', text)
    for found in _NAMED.finditer(bare):
        name = found.group(0)
        if name.startswith("<["):
            raise Refused(f"{name}: tokens cannot be given by number; name an added token, as in <tool_call>")
        if name in reserved:
            raise Refused(f"{name} ends or frames messages and cannot be part of an output")
    for found in _ATTRIBUTES.finditer(bare):
        unheard = _UNHEARD.search(found.group(1))
        if unheard is not None:
            raise Refused(f"the attribute {unheard.group(0)} has no effect on what is generated; leave it out")


def _check_needed(text: str, probe: Probe) -> None:
    """Refuses a grammar if a terminal that the gateway marks as needed has no text."""
    terminals = "\n".join(line for line in text.split("\n") if _TERMINAL.match(line))
    for name, origin in all_needed(text):
        try:
            empty = probe.empty(name, terminals)
        except Refused as error:
            raise Refused(origin.refusal(f"#{origin.path}: {error}"), origin.field) from None
        if empty:
            why = f"#{origin.path}: no text can fulfil it: its demands contradict each other"
            raise Refused(origin.refusal(why), origin.field)


def _with_schemas(text: str, probe: Probe) -> str:
    """Replaces each schema in a grammar (``%json {…}``) by a rule, compiled as a schema of its own."""
    parts: list[str] = []
    schemas: list[str] = []
    done = at = 0
    while (found := _LITERAL_OR_JSON.search(text, at)) is not None:
        at = found.end()
        if found.group(0).startswith("%json"):
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise Refused(f"%json is not followed by a JSON schema: {error}") from None
            name = f"{_SCHEMA_RULE}{len(schemas)}"
            parts += (text[done : found.start()], name)
            schemas.append(f"{name}: %lark {{\n{grammar_of(parsed(text[at:end]), probe)}}}\n")
            done = at = end
    return "".join([*parts, text[done:], *(["\n", *schemas] if schemas else [])])


def reason_of(message: str, constraint: Constraint) -> str:
    """Error of llguidance about a grammar, in one line: without the excerpt of our own source, and without line numbers
    if the client did not write the grammar."""
    text = _EXCERPT.split(message, maxsplit=1)[0]
    text = _PLACE.sub(lambda found: f"line {max(int(found[1]) - 1, 1)}, column {found[2]}: ", text)
    if constraint.kind is not ConstraintKind.LARK or constraint.param == _OF_TOOLS:
        text = _WHERE.sub("", text)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "…"
