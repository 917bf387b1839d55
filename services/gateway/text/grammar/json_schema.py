"""Demands of a JSON schema on a value that is written without quotes, between tags: texts and scalars."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from services.common.errors import InvalidRequest
from services.common.json_schema import formats
from services.common.json_schema.numbers import Numbers, NumbersError
from services.common.json_schema.patterns import PatternError
from services.common.json_schema.terminals import found_in, literal
from services.common.text.tool_calls.parameter_types import kind_of, resolve
from services.gateway.text.grammar.lark import expression, stands

_MOST_LEAVES = 256
_MOST_SCHEMAS = 1024
_DEEPEST = 32
_UNENFORCEABLE = ("not", "if", "then", "else", "$dynamicRef")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One way to be valid: all of these at once.

    Args:
        kinds: JSON types; None: any.
        values: of an enum or const; None: any.
        patterns: to be found in a text.
        shortest: fewest characters.
        longest: most characters; None: any number.
        numbers: which numbers.
    """

    kinds: frozenset[str] | None = None
    values: tuple[Any, ...] | None = None
    patterns: tuple[str, ...] = ()
    shortest: int = 0
    longest: int | None = None
    numbers: Numbers = field(default_factory=Numbers)

    def __and__(self, other: Leaf) -> Leaf:
        kinds = self.kinds if other.kinds is None else other.kinds if self.kinds is None else self.kinds & other.kinds
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            common = set(map(_key, other.values))
            values = tuple(value for value in self.values if _key(value) in common)
        longest = [limit for limit in (self.longest, other.longest) if limit is not None]
        return Leaf(
            kinds,
            values,
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            max(self.shortest, other.shortest),
            min(longest) if longest else None,
            self.numbers & other.numbers,
        )

    def of_kind(self, kind: str) -> Leaf | None:
        """Leaf without the values of other types; None: it has none of this one. A whole number is an "integer" and a
        "number"."""
        wanted = {kind, "integer"} if kind == "number" else {kind}
        allowed = None if self.kinds is None else self.kinds | ({"integer"} if "number" in self.kinds else set())
        if allowed is not None and not allowed & wanted:
            return None
        if self.values is None:
            return self
        values = tuple(value for value in self.values if kind_of(value) in wanted and self._fits(value))
        return replace(self, values=values) if values else None

    def _fits(self, value: Any) -> bool:
        if isinstance(value, str):
            return len(value) >= self.shortest and (self.longest is None or len(value) <= self.longest)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return Fraction(str(value)) in self.numbers
        return True

    def excludes(self, other: Leaf) -> bool:
        """True if no text or scalar is valid under both, as far as that is soon seen."""
        both = self & other
        kinds = {kind for kind in (*_SCALARS, "string") if both.of_kind(kind) is not None}
        if both.values is not None:
            return not kinds
        too_short = both.longest is not None and both.longest < both.shortest
        return not (kinds - ({"string"} if too_short else set()))


def _key(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are, 1 and true are not."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def leaves(schema: Any, root: Any, param: str) -> list[Leaf]:
    """The ways to be valid under a schema.

    Raises:
        InvalidRequest: it uses what cannot be enforced in a value without quotes.
    """
    return _leaves(schema, root, param, iter(range(_MOST_SCHEMAS)), 0)


def _leaves(schema: Any, root: Any, param: str, budget: Iterator[int], depth: int) -> list[Leaf]:
    if depth > _DEEPEST or next(budget, None) is None:
        raise InvalidRequest(f"{param}: its references are nested too deeply to be enforced", param=param)
    if schema is True:
        return [Leaf()]
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{param}: {json.dumps(schema)[:80]} is not a JSON schema", param=param)
    if "not" in schema and schema["not"] in (True, {}):
        return []
    for keyword in _UNENFORCEABLE:
        if keyword in schema and not (keyword == "not" and schema["not"] is False):
            raise InvalidRequest(
                f"{param}: {keyword!r} cannot be enforced for a text: leave it out, or do not force the call",
                param=param,
            )
    found = [_own(schema, param)]
    if "$ref" in schema:
        target = resolve(schema, root)
        if target is None:
            raise InvalidRequest(f"{param}: $ref {str(schema['$ref'])[:80]!r} leads nowhere", param=param)
        found = _both(found, _leaves(target, root, param, budget, depth + 1), param)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            parts = [_leaves(member, root, param, budget, depth + 1) for member in _list(schema[union])]
            if union == "oneOf":
                _check_exclusive(parts, param)
            found = _both(found, [leaf for part in parts for leaf in part], param)
    for member in _list(schema.get("allOf", [])):
        found = _both(found, _leaves(member, root, param, budget, depth + 1), param)
    return found


def _both(left: list[Leaf], right: list[Leaf], param: str) -> list[Leaf]:
    if len(left) * len(right) > _MOST_LEAVES:
        raise InvalidRequest(f"{param}: it has more than {_MOST_LEAVES} alternatives", param=param)
    return [a & b for a in left for b in right]


def _check_exclusive(parts: list[list[Leaf]], param: str) -> None:
    for place, part in enumerate(parts):
        for other in range(place):
            if not all(a.excludes(b) for a in part for b in parts[other]):
                raise InvalidRequest(
                    f"{param}: 'oneOf' cannot be enforced: a value may be valid under {other} and {place} of it at "
                    "once: use anyOf, or make them exclude each other",
                    param=param,
                )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _own(schema: Mapping[str, Any], param: str) -> Leaf:
    kinds = schema.get("type")
    values: list[Any] | None = None
    if "enum" in schema:
        values = _list(schema["enum"])
    if "const" in schema:
        values = [schema["const"]] if values is None or _key(schema["const"]) in set(map(_key, values)) else []
    pattern, shortest, longest = (schema.get(key) for key in ("pattern", "minLength", "maxLength"))
    if (
        not isinstance(pattern, str | None)
        or not isinstance(shortest, int | None)
        or not isinstance(longest, int | None)
    ):
        raise InvalidRequest(f"{param}: pattern must be a text, minLength and maxLength whole numbers", param=param)
    named = None if kinds is None else frozenset(kind for kind in _list(kinds) if isinstance(kind, str))
    patterns = [] if pattern is None else [pattern]
    shape = schema.get("format")
    if isinstance(shape, str) and (named is None or "string" in named):
        of_format = formats.pattern_of(shape)
        if of_format is not None:
            patterns.append(of_format)
        elif not formats.says_nothing(shape, schema):
            raise InvalidRequest(
                f"{param}: 'format' {shape[:80]!r} is not known and would say nothing: describe it by a pattern",
                param=param,
            )
    return Leaf(
        named,
        None if values is None else tuple(values),
        tuple(patterns),
        max(0, shortest or 0),
        longest,
        _numbers(schema, param),
    )


def _numbers(schema: Mapping[str, Any], param: str) -> Numbers:
    found = Numbers()
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(keyword)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (float("inf"), float("-inf")):
            raise InvalidRequest(f"{param}: '{keyword}' must be a number", param=param)
        bound, is_open = Fraction(str(value)), keyword.startswith("exclusive")
        if keyword == "multipleOf":
            if bound <= 0:
                raise InvalidRequest(f"{param}: 'multipleOf' must be more than 0", param=param)
            found &= Numbers(step=bound)
        elif keyword.endswith("inimum"):
            found &= Numbers(low=bound, low_open=is_open)
        else:
            found &= Numbers(high=bound, high_open=is_open)
    bounds = formats.bounds_of(str(schema.get("format"))) if "integer" in _list(schema.get("type")) else None
    if bounds is not None and "number" not in _list(schema.get("type")):
        found &= Numbers(low=Fraction(bounds[0]), high=Fraction(bounds[1]))
    return found


def is_free(leaf: Leaf) -> bool:
    """True if a leaf allows any text, but for an empty one."""
    return leaf.values is None and not leaf.patterns and leaf.longest is None and leaf.shortest <= 1


def text_terminal(leaf: Leaf, exclude: str, param: str) -> str | None:
    """A terminal of the texts that a leaf allows; None if there is none.

    Args:
        leaf: ``of_kind("string")``.
        exclude: a terminal of the texts that must not be among them; empty: none.

    Raises:
        InvalidRequest: a text that it demands cannot be written.
    """
    if leaf.longest is not None and leaf.longest < leaf.shortest:
        return None
    parts = []
    if leaf.values is not None:
        texts = [value for value in leaf.values if isinstance(value, str)]
        for text in texts:
            ended = any(text.startswith(f"{other}\n</parameter>\n") for other in texts)
            if ended or not stands(text):
                raise InvalidRequest(
                    f"{param}: the text {text[:80]!r} cannot be an argument: it has lines of a call that would end it",
                    param=param,
                )
        if not texts:
            return None
        parts.append(f"({' | '.join(map(literal, texts))})")
    elif is_free(leaf):
        parts.append("VALUE")
        if leaf.shortest:
            parts.append(expression("(?s:.+)"))
    else:
        parts.append("PLAIN")
        bounds = f"{{{leaf.shortest},{'' if leaf.longest is None else leaf.longest}}}"
        if bounds != "{0,}":
            parts.append(expression(f"(?s:.{bounds})"))
    for pattern in leaf.patterns:
        try:
            parts.append(found_in(pattern, quoted=False))
        except PatternError as error:
            raise InvalidRequest(
                f"{param}: 'pattern' {pattern[:80]!r} cannot be enforced: {error}", param=param
            ) from None
    if exclude:
        parts.append(f"~({exclude})")
    return f"({' & '.join(parts)})"


_SCALARS: Mapping[str, str] = {"integer": "", "number": "", "boolean": '("true" | "false")', "null": '"null"'}
"""Terminals of those that have no bounds."""


def scalar_terminal(leaf: Leaf, kind: str, param: str) -> str | None:
    """A terminal of the scalars that a leaf allows beside texts; None if there is none.

    Args:
        leaf: ``of_kind(kind)``.

    Raises:
        InvalidRequest: its numbers cannot be written.
    """
    if leaf.values is not None:
        return f"({' | '.join(literal(json.dumps(value)) for value in leaf.values)})"
    if kind not in ("integer", "number"):
        return _SCALARS[kind]
    try:
        written = replace(leaf.numbers, whole=leaf.numbers.whole or kind == "integer").expression()
    except NumbersError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return None if written is None else expression(written)


_LOOKS_LIKE: Mapping[str, str] = {
    "integer": expression(r"[ \t\r\n]*-?(0|[1-9][0-9]*)[ \t\r\n]*"),
    "number": expression(r"[ \t\r\n]*-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?[ \t\r\n]*"),
    "boolean": expression(r"[ \t\r\n]*(?i:true|false)[ \t\r\n]*"),
    "null": expression(r"[ \t\r\n]*(?i:null|none)[ \t\r\n]*"),
    "object": expression(r"[ \t\r\n]*[{\[](?s:.*)"),
    "array": expression(r"[ \t\r\n]*[{\[](?s:.*)"),
}


def looks_like(kinds: Iterable[str]) -> str:
    """A terminal of the texts that a parser would read as one of these types, and more that begin like them."""
    return " | ".join(dict.fromkeys(_LOOKS_LIKE[kind] for kind in sorted(kinds)))
