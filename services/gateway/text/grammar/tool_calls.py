"""The grammar of Qwen's tool calls for given functions, in llguidance's variant of Lark.

A call has the very form that the chat template shows:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Parameters stand in the order of the schema. A parameter that is a text is free up to its closing tag, within what the
schema says of it; every other type is JSON by its schema. What the grammar allows, tools.py reads as what it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.json_schema.origin import Origin, marked, needed
from services.common.json_schema.terminals import literal
from services.common.text.tool_calls.parameter_types import CONTAINERS, definitions_for, resolve, types_of
from services.common.text.tool_calls.parser import CLOSE, END_FUNCTION, END_PARAMETER, FUNCTION, OPEN, PARAMETER
from services.gateway.text.grammar.json_schema import is_free, leaves, looks_like, scalar_terminal, text_terminal
from services.gateway.text.grammar.lark import contains, expression, quote, terminals

_END_VALUE = f"\n{END_PARAMETER}\n"
_KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_LONGEST_KEY = 256
_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "propertyNames", "$defs", "definitions", "$ref"}
)
_SAYS_TYPE = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
_NOTE_NAMES = """
    title description $schema $id id $comment default examples example deprecated readOnly writeOnly strict $anchor
    discriminator xml externalDocs
"""
_NOTES = frozenset(_NOTE_NAMES.split())


@dataclass(frozen=True, slots=True)
class CallForm:
    """A function that may be called, and how far its calls are bound.

    Args:
        name: as it is offered.
        parameters: JSON schema of its arguments.
        enforced: arguments follow the schema; otherwise only the form of a call is.
        param: the request field of the schema.
    """

    name: str
    parameters: Mapping[str, Any] | None
    enforced: bool
    param: str


@dataclass(frozen=True, slots=True)
class TurnForm:
    """Form of a turn with tool calls: what may stand around them.

    Args:
        forced: there is at least one call and no text.
        repeat: more than one call may follow.
        document: JSON schema of what may be written instead of calls; None: any text, unless forced.
        param: the request field of that schema.
    """

    forced: bool
    repeat: bool
    document: Mapping[str, Any] | None = None
    param: str = "response_format"


def tool_grammar(functions: Sequence[CallForm], form: TurnForm, tokens: Collection[str], *, limit: int) -> str:
    """A grammar of an assistant's turn.

    Args:
        functions: those that may be called.
        form: what may stand around the calls.
        tokens: which of the tags `<tool_call>` and `</tool_call>` are tokens of the model, which a grammar names; the
            same spelled out is allowed as well.
        limit: most bytes of the grammar.

    Raises:
        InvalidRequest: a schema asks for what cannot be enforced, or the grammar is too large.
    """
    return _Writer(functions, form, tokens, limit).text()


class _Writer:
    def __init__(self, functions: Sequence[CallForm], form: TurnForm, tokens: Collection[str], limit: int) -> None:
        self._rules: list[str] = []
        self._limit = self._left = limit
        self._tokens = tokens
        self._number = 0
        self._loose = False
        names = [self._function(index, function) for index, function in enumerate(functions)]
        written, self._rules = self._rules, []
        for rule in (*self._answer(form), f"body: {' | '.join(names)}"):
            self._rule(rule)
        self._rules += written
        self._rule(f"open: {self._tag(OPEN)}")
        self._rule(f"close: {self._tag(CLOSE)}")
        for rule in terminals():
            self._rule(rule)
        # One lexeme with the tag that ends it: of several that begin alike, only the longest would be tried.
        self._rule("begin[lazy]: BEGIN")
        self._rule(f"BEGIN: VALUE {literal(_END_VALUE)}")
        self._rule("behind[lazy]: BEHIND")
        self._rule(f"BEHIND: BEHIND_ONE {literal(_END_VALUE)}")
        # A closing line that closes nothing is of the text if more of it follows.
        self._rule(f"stray: {literal(f'{END_PARAMETER}{chr(10)}')}")
        self._rule("more: behind | stray")
        self._rule("text: begin more* | stray more+")

    def text(self) -> str:
        return "\n".join(self._rules) + "\n"

    def _rule(self, text: str) -> None:
        self._rules.append(text)
        self._left -= len(text.encode()) + 1
        if self._left < 0:
            raise InvalidRequest(
                f"the grammar of these tools has more than {self._limit} bytes: offer fewer, or allow fewer with "
                "tool_choice",
                param="tools",
            )

    def _tag(self, tag: str) -> str:
        return " | ".join([tag, literal(tag)] if tag in self._tokens else [literal(tag)])

    def _answer(self, form: TurnForm) -> list[str]:
        call = "call: open body close"
        calls = f"calls: call{' (SEPARATOR call)*' if form.repeat else ''}"
        separator = f"SEPARATOR: {literal(chr(10))}"
        if form.forced:
            return ["start: calls", calls, call, separator]
        if form.document is not None:
            document = _json(marked(form.document, Origin(form.param)))
            return ["start: calls | document", calls, call, separator, f"document: %json {document}"]
        # Text runs on until it has an opening tag in it: spelled out, which ends the lexeme, or as the token.
        token = f" | TEXT {OPEN} body close" if OPEN in self._tokens else ""
        return [
            f"start: {'called* TEXT' if form.repeat else 'called | TEXT'}",
            f"called: up_to_tag body close{token}",
            "up_to_tag[lazy]: UP_TO_TAG",
            f"UP_TO_TAG: {expression(f'(?s:.*){quote(OPEN)}')}",
            f"TEXT: /(?s:.*)/ & ~{contains([OPEN])}",
        ]

    def _function(self, index: int, function: CallForm) -> str:
        name = f"f{index}"
        head = literal(f"\n{FUNCTION}{function.name}>\n")
        if not function.enforced:
            self._loosely()
            self._rule(f"{name}: {head} any_parameter* {literal(f'{END_FUNCTION}{chr(10)}')}")
            return name
        try:
            parts = [head, *self._parameters(function), literal(f"{END_FUNCTION}\n")]
        except InvalidRequest as error:
            why = error.message.removeprefix(f"{error.param}: ")
            raise InvalidRequest(f"{error.param}: function {function.name!r}: {why}", param=error.param) from None
        self._rule(f"{name}: {' '.join(parts)}")
        return name

    def _loosely(self) -> None:
        if not self._loose:
            self._loose = True
            self._rule(f"any_parameter: {literal(PARAMETER)} ANY_KEY {literal(f'>{chr(10)}')} text")
            self._rule("ANY_KEY: /[^<>\\n]{1,256}/ & ~/[ \\t]*/")

    def _parameters(self, function: CallForm) -> list[str]:
        root, where = function.parameters, function.param
        schema = resolve(root, root) if root is not None else {}
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"{where}: its $ref leads nowhere", param=where)
        unknown = sorted(key for key in schema.keys() - _KEYWORDS - _NOTES if not key.startswith("x-"))
        if unknown or schema.get("type", "object") not in ("object", ["object"]):
            at_fault = repr(unknown[0]) if unknown else "a 'type' other than 'object'"
            raise InvalidRequest(
                f"{where}: {at_fault} beside the properties of a function cannot be enforced: leave it out, or leave "
                "out strict and send tool_choice 'auto'",
                param=where,
            )
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise InvalidRequest(f"{where}: properties must be an object and required a list", param=where)
        extra = schema.get("additionalProperties", False)
        described = dict(properties)
        for key in required:
            if not isinstance(key, str) or (key not in described and extra is False):
                raise InvalidRequest(
                    f"{where}: required names {str(key)[:80]!r}, which properties does not describe", param=where
                )
            described.setdefault(key, extra)
        names = self._names(schema, where)
        if names is not None:
            described = {**described, **{name: extra for name in names if name not in described and extra is not False}}
            described = {key: value if key in names else False for key, value in described.items()}
            extra = False
        parts = []
        for key, value in described.items():
            place = f"/properties/{_escaped(key)}" if key in properties else "/additionalProperties"
            written = self._parameter(key, value, root, function, place)
            if written is None and key in required:
                raise InvalidRequest(f"{where}: no value is valid for the parameter {key[:80]!r}", param=where)
            if written is not None:
                parts.append(written if key in required else f"({written})?")
        if extra is not False:
            value = self._value(extra, root, f"{where}.additionalProperties", function, "/additionalProperties")
            self._number += 1
            known = "|".join(map(quote, described))
            self._rule(f"KEY{self._number}: /{_KEY}/" + (f" & ~{expression(known)}" if known else ""))
            if value is not None:
                parts.append(f"({literal(PARAMETER)} KEY{self._number} {literal(f'>{chr(10)}')} {value})*")
        return parts

    def _names(self, schema: Mapping[str, Any], where: str) -> list[str] | None:
        """All names that there may be; None: any."""
        wanted = schema.get("propertyNames", True)
        said = wanted.keys() - _NOTES if isinstance(wanted, Mapping) else set()
        if wanted is True or (
            isinstance(wanted, Mapping) and wanted.get("type", "string") == "string" and said <= {"type"}
        ):
            return None
        names = wanted.get("enum") if isinstance(wanted, Mapping) and said <= {"type", "enum"} else None
        if not isinstance(names, list):
            raise InvalidRequest(
                f"{where}: 'propertyNames' of the parameters of a function is enforced as an enum only: list the "
                "names, or leave it out",
                param=where,
            )
        return [name for name in names if isinstance(name, str)]

    def _parameter(self, key: str, schema: Any, root: Any, function: CallForm, place: str) -> str | None:
        where = function.param
        if not key or key != key.strip() or len(key) > _LONGEST_KEY or any(character in key for character in "<>\n"):
            raise InvalidRequest(
                f"{where}: the parameter name {key[:80]!r} cannot be written in a call: no '<', '>' or line break, no "
                f"white space around it, at most {_LONGEST_KEY} characters",
                param=where,
            )
        value = self._value(schema, root, f"{where}.properties.{key[:64]}", function, place)
        return None if value is None else f"{literal(f'{PARAMETER}{key}>{chr(10)}')} {value}"

    def _value(self, schema: Any, root: Any, where: str, function: CallForm, place: str) -> str | None:
        """A value up to and with its closing tag; None if the schema allows none."""
        if schema is False:
            return None
        types = types_of(schema, root)
        if types and "string" not in types:
            return f"{self._json_rule(schema, root, types, function, place)} {literal(_END_VALUE)}"
        others = types - {"string"}
        containers = others & CONTAINERS
        found = []
        free = False
        for leaf in leaves(schema, root, where):
            text = leaf.of_kind("string")
            if text is not None:
                found.append(text_terminal(text, looks_like(others), where))
                free = free or is_free(text)
            for kind in sorted(others - CONTAINERS):
                scalar = leaf.of_kind(kind)
                if scalar is not None:
                    found.append(scalar_terminal(scalar, kind, where))
        written = list(dict.fromkeys(terminal for terminal in found if terminal is not None))
        choices = []
        if written == ["(VALUE)"]:
            choices.append("text")
        elif written:
            self._number += 1
            self._rule(f"v{self._number}[lazy]: V{self._number}")
            self._rule(f"V{self._number}: ({' | '.join(written)}) {literal(_END_VALUE)}")
            if not containers:
                self._rule(needed(f"V{self._number}", Origin(function.param, function.name, place)))
            choices.append(f"v{self._number} more* | stray more+" if free else f"v{self._number}")
        if containers:
            choices.append(f"{self._json_rule(schema, root, containers, function, place)} {literal(_END_VALUE)}")
        return f"({' | '.join(choices)})" if choices else None

    def _json_rule(self, schema: Any, root: Any, types: frozenset[str], function: CallForm, place: str) -> str:
        definitions = definitions_for(schema, root)
        if definitions is None:
            raise InvalidRequest(
                f"{function.param}: #{place}: a $ref must name one of the schema's $defs to be enforced: put what it "
                "refers to there",
                param=function.param,
            )
        said = types == types_of(schema, root) and bool(schema.keys() & _SAYS_TYPE)
        origin = Origin(function.param, function.name, place, () if said else tuple(sorted(types)))
        self._number += 1
        self._rule(f"j{self._number}: %json {_json(marked({**schema, **definitions}, origin))}")
        return f"j{self._number}"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)
