"""Terminals of JSON strings, and the texts that they have."""

from __future__ import annotations

import json

from services.common.json_schema import terminals
from services.common.json_schema.patterns import PatternError
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.probe import Probe
from services.engine.constraints.schema.shapes import Pattern, Strings

_LONGEST = 100_000
_HEX = "[0-9A-Fa-f]"
_CHARACTER = (
    r'(?:[^"\\\x00-\x1f]|\\["\\\x{2f}bfnrt]'
    rf"|\\u(?:[0-9A-Ca-cE-Fe-f]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}))"
)
"""Expression of one character in every spelling of JSON; surrogates only in pairs."""
ANY = f'/"{_CHARACTER}*"/'


class StringTerminals:
    """Writes the terminals of strings, and tells which texts they have.

    Args:
        probe: answers questions about terminals.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._known: dict[tuple[Strings, bool], str | None] = {}

    def terminal(self, strings: Strings, *, one_spelling: bool = False) -> str | None:
        """Terminal of the strings; None: there are none.

        Args:
            one_spelling: whether each text has one spelling only, so that the terminal can be intersected and negated.

        Raises:
            Refused: they cannot be written.
        """
        key = strings, one_spelling
        if key not in self._known:
            self._known[key] = self._fresh(strings, one_spelling)
        return self._known[key]

    def _fresh(self, strings: Strings, one_spelling: bool) -> str | None:
        if strings.most is not None and strings.most < strings.least:
            return None
        for keyword, count in (("minLength", strings.least), ("maxLength", strings.most or 0)):
            if count > _LONGEST and strings.values is None:
                raise Refused(f"'{keyword}' {count} is more than can be counted: the limit is {_LONGEST}")
        if strings.values is not None:
            values = [value for value in strings.values if self.accepts(strings, value)]
            return f"({' | '.join(map(literal, values))})" if values else None
        if not one_spelling and not strings.patterns and not strings.excluded:
            return self._of_length(strings)
        parts = self._parts(strings, strings.patterns)
        if self._empty(strings, parts):
            # A format is mainly an annotation: if the pattern beside it contradicts it, the pattern wins.
            patterns = tuple(each for each in strings.patterns if not self._contradicted(each))
            if len(patterns) == len(strings.patterns):
                return None
            parts = self._parts(strings, patterns)
            if self._empty(strings, parts):
                return None
        return f'(/"/ {every(parts)} /"/)'

    def _contradicted(self, pattern: Pattern) -> bool:
        beside = pattern.at.schema.get("pattern")
        if pattern.keyword != "format" or beside is None:
            return False
        return self._probe.empty(every([self.found(pattern), self.found(Pattern(beside, pattern.at))]))

    def _of_length(self, strings: Strings) -> str:
        if (strings.least, strings.most) == (0, None):
            return ANY
        return f'/"{_CHARACTER}{{{strings.least},{"" if strings.most is None else strings.most}}}"/'

    def _parts(self, strings: Strings, patterns: tuple[Pattern, ...]) -> list[str]:
        parts = [self.found(each) for each in patterns]
        if not patterns or any(each.negated for each in patterns) or (strings.least, strings.most) != (0, None):
            parts.insert(0, terminals.of_length(strings.least, strings.most, quoted=True))
        parts += [f"~{inner(text)}" for text in strings.excluded]
        return parts

    def found(self, pattern: Pattern) -> str:
        """Terminal of the texts that match a pattern, without the quotes.

        Raises:
            Refused: the pattern cannot be enforced.
        """
        try:
            found = terminals.found_in(pattern.text, quoted=True)
        except PatternError as error:
            raise pattern.at.refuse(pattern.keyword, f"{pattern.text[:80]!r} cannot be enforced: {error}") from None
        return f"~{found}" if pattern.negated else found

    def _empty(self, strings: Strings, parts: list[str]) -> bool:
        try:
            return self._probe.empty(every(parts))
        except Refused as error:
            first = strings.patterns[0] if strings.patterns else None
            if first is None:
                raise
            raise first.at.refuse(first.keyword, f"{first.text[:80]!r} cannot be enforced: {error}") from None

    def accepts(self, strings: Strings, text: str) -> bool:
        """True if a text is one of the strings."""
        if not strings.least <= len(text) or (strings.most is not None and len(text) > strings.most):
            return False
        if text in strings.excluded or (strings.values is not None and text not in strings.values):
            return False
        written = _spelled(text)
        return all(self.matches(each, written) for each in strings.patterns)

    def matches(self, pattern: Pattern, written: str) -> bool:
        """True if a text, spelled as in JSON, matches a pattern."""
        terminal = self.found(pattern)
        return self._probe.matches(every([terminal]), written)

    def nonempty(self, terminal: str) -> bool:
        """True if a terminal has texts."""
        return not self._probe.empty(terminal)


def every(parts: list[str]) -> str:
    """Terminal of the texts that all given terminals have, without the quotes."""
    if all(part.startswith("~") for part in parts):
        parts = [terminals.of_length(0, None, quoted=True), *parts]
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


def _spelled(text: str) -> str:
    """Text as spelled in a JSON string, without the quotes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("a text with a lone surrogate cannot be generated") from None
    return json.dumps(text, ensure_ascii=False)[1:-1]


def spelled(text: str) -> str:
    """Text as a JSON string."""
    return f'"{_spelled(text)}"'


def literal(text: str) -> str:
    """Terminal of a text as a JSON string."""
    return terminals.literal(spelled(text))


def inner(text: str) -> str:
    """Terminal of a text in a JSON string, without the quotes."""
    return terminals.literal(_spelled(text))
