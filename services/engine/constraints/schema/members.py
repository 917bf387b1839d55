"""Members that an object may have: those with known names, in order, and kinds of others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from services.common.json_schema import terminals
from services.common.json_schema.patterns import PatternError
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.reading import Reader
from services.engine.constraints.schema.shapes import Demands, Layer, Objects, Pattern, Strings, joined
from services.engine.constraints.schema.strings import ANY, StringTerminals, every, inner

_MOST_PATTERNS = 5
_MOST_FINITE = 64


@dataclass(frozen=True, slots=True)
class Member:
    """Member with a known name."""

    name: str
    value: Demands
    required: bool


@dataclass(frozen=True, slots=True)
class Others:
    """Members whose names a terminal describes; it excludes the known ones."""

    terminal: str
    value: Demands


class MemberReader:
    """Reads the members of objects.

    Args:
        reader: reader of the document.
        strings: writes the terminals of names.
    """

    def __init__(self, reader: Reader, strings: StringTerminals) -> None:
        self._reader = reader
        self._strings = strings

    def known(self, objects: Objects) -> list[Member] | None:
        """Members with known names, in order; None: a required one is impossible."""
        names = dict.fromkeys(name for layer in objects.layers for name in layer.properties)
        names.update(dict.fromkeys(objects.required))
        names.update(dict.fromkeys(self._finite(objects) or ()))
        allowed = self._names(objects)
        found = []
        for name in names:
            required = name in objects.required
            value = self._value(objects, name)
            fits = value is not None and (
                allowed is None or any(self._strings.accepts(strings, name) for strings in allowed)
            )
            if fits and value is not None:
                found.append(Member(name, value, required))
            elif required:
                return None
        return found

    def others(self, objects: Objects, known: list[Member]) -> list[Others]:
        """Members with other names, in kinds that exclude each other.

        Raises:
            Refused: the patterns of names are too many or too complex.
        """
        allowed = self._names(objects)
        if self._finite(objects) is not None:
            return []
        patterns = list(dict.fromkeys(pattern for layer in objects.layers for pattern, _ in layer.patterns))
        if len(patterns) > _MOST_PATTERNS:
            raise patterns[0].at.refuse(
                "patternProperties",
                f"of {len(patterns)} patterns at once is not enforced: the limit is {_MOST_PATTERNS}",
            )
        # Known names are excluded from the others, also if their members are impossible.
        named = dict.fromkeys(name for layer in objects.layers for name in layer.properties)
        named.update(dict.fromkeys(member.name for member in known))
        if not named and not patterns and allowed is None:
            value = joined(*((layer.extra,) for layer in objects.layers if layer.extra is not None))
            return [] if _never(value) else [Others(ANY, value)]
        found = []
        for chosen in product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, is_in in zip(patterns, chosen, strict=True) if is_in}
            value = joined(*(_layer_value(layer, matched) for layer in objects.layers))
            if _never(value):
                continue
            parts = []
            for pattern, is_in in zip(patterns, chosen, strict=True):
                written = self._strings.found(pattern)
                parts.append(written if is_in else f"~{written}")
            if named:
                parts.append(f"~({' | '.join(map(inner, named))})")
            for strings in allowed or [Strings()]:
                terminal = self._terminal(objects, strings, parts, patterns)
                if terminal is not None:
                    found.append(Others(terminal, value))
        return found

    def _terminal(self, objects: Objects, strings: Strings, parts: list[str], patterns: list[Pattern]) -> str | None:
        base = self._strings.terminal(strings, one_spelling=True)
        if base is None:
            return None
        if not parts:
            return base
        whole = f'(/"/ {every(parts)} /"/)'
        if strings != Strings():
            whole = f"({whole} & {base})"
        try:
            return whole if self._strings.nonempty(whole) else None
        except Refused as error:
            at = patterns[0].at if patterns else objects.layers[0].at
            keyword = "patternProperties" if patterns else "additionalProperties"
            raise at.refuse(keyword, f"cannot be enforced: {error}") from None

    def _value(self, objects: Objects, name: str) -> Demands | None:
        """Demands on the member of a name; None: the member is impossible."""
        found: list[Demands] = []
        for layer in objects.layers:
            matched = {pattern for pattern, _ in layer.patterns if self._matches(pattern, name)}
            if name in layer.properties:
                found.append(
                    (layer.properties[name], *(node for pattern, node in layer.patterns if pattern in matched))
                )
            else:
                found.append(_layer_value(layer, matched))
        value = joined(*found)
        return None if _never(value) else value

    def _matches(self, pattern: Pattern, name: str) -> bool:
        return self._strings.accepts(Strings(patterns=(pattern,)), name)

    def _names(self, objects: Objects) -> list[Strings] | None:
        """Names that `propertyNames` allows; None: any name."""
        if not objects.names:
            return None
        found = [shape.strings for shape in self._reader.alternatives(objects.names) if shape.strings is not None]
        return None if Strings() in found else found

    def _finite(self, objects: Objects) -> list[str] | None:
        """All possible names if they are few, else None."""
        allowed = self._names(objects)
        if allowed is not None and all(strings.values is not None for strings in allowed):
            return [value for strings in allowed for value in strings.values or ()]
        for layer in objects.layers:
            if layer.extra is None or not _never((layer.extra,)):
                continue
            listed = [self._listed(pattern) for pattern, _ in layer.patterns]
            if all(each is not None for each in listed):
                return [*layer.properties, *(name for each in listed for name in each or ())]
        return None

    def _listed(self, pattern: Pattern) -> list[str] | None:
        try:
            return terminals.finite(pattern.text, _MOST_FINITE)
        except PatternError as error:
            raise pattern.at.refuse(pattern.keyword, f"{pattern.text[:80]!r} cannot be enforced: {error}") from None


def _layer_value(layer: Layer, matched: set[Pattern]) -> Demands:
    """Demands of a layer on a member that is not among its properties."""
    found = tuple(node for pattern, node in layer.patterns if pattern in matched)
    if found or layer.extra is None:
        return found
    return (layer.extra,)


def _never(demands: Demands) -> bool:
    return any(node.schema is False or node.schema == {"not": {}} for node in demands)
