"""Patterns for the names of modules, as PEFT means them (Python's `re`), in time that no pattern can make long.

RE2 reads most of them, in linear time. It has no lookaround, which Unsloth, ms-swift and LLaMA-Factory write into their
adapters; those are matched here by sets of positions: every part of a pattern maps the set of positions at which it may
begin to the set at which it may then end. A set is an integer with one bit a position, and a lookahead is the same walk
backwards from wherever it may end, so nothing is ever tried twice.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from re import _parser
from typing import Any, TypeAlias

import re2

MAX_LENGTH = 2000
"""Characters of a pattern."""
MAX_STEPS = 2_000_000
"""Parts of patterns with lookaround that one configuration may have looked at: about a second."""
_PLAIN = re.compile(r"[\w.]*", re.ASCII)
_MEANS_OTHER = ("{,", "[:")
"""Syntax that both engines accept and read differently: `x{,3}` and `[[:alpha:]]`."""
_Op: TypeAlias = tuple[Any, Any]


class PatternRefused(ValueError):
    """A pattern that is not evaluated here; says why."""


class PatternMalformed(PatternRefused):
    """A pattern that Python does not read either."""


class Effort:
    """Budget of steps for matching the patterns of one configuration.

    Args:
        steps: parts of patterns.
    """

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self) -> None:
        """Raises PatternRefused when there is nothing left."""
        self._left -= 1
        if self._left < 0:
            raise PatternRefused("takes too long to match: write the names of the modules as a list instead")


def whole(pattern: str, effort: Effort) -> Callable[[str], bool]:
    """Matcher with the results of `re.fullmatch(pattern, name)` on names of modules.

    Raises:
        PatternRefused: the pattern is malformed, or beyond what is evaluated here; also from the matcher itself.
    """
    tree = _parsed(pattern, pattern)
    if (linear := _linear(pattern, pattern)) is not None:
        return lambda name: linear.fullmatch(name) is not None
    return _walked(tree, effort, to_the_end=True)


def tail(key: str, effort: Effort) -> Callable[[str], bool]:
    """Match of a key of rank_pattern or alpha_pattern as PEFT finds it (get_pattern_key): the whole name, or what
    follows one of its dots. Raises as whole()."""
    expression = rf"(.*\.)?({key})$"
    tree = None if _PLAIN.fullmatch(key) and len(key) <= MAX_LENGTH else _parsed(expression, key)
    if (linear := _linear(expression, key)) is not None:
        return lambda name: linear.match(name) is not None
    return _walked(tree or _parsed(expression, key), effort, to_the_end=False)


def _parsed(expression: str, pattern: str) -> Any:
    """Python's parse of an expression that was made of a pattern."""
    if len(pattern) > MAX_LENGTH:
        raise PatternRefused(f"is over {MAX_LENGTH} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what later versions of Python may read otherwise
            return _parser.parse(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternMalformed(str(error)) from error


def _linear(expression: str, pattern: str) -> Any:
    """Expression made of a pattern, compiled by RE2; None if RE2 does not read it, or not as Python does."""
    if any(text in pattern for text in _MEANS_OTHER):
        return None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(expression, options)
    except re2.error:
        return None


def _walked(tree: Any, effort: Effort, *, to_the_end: bool) -> Callable[[str], bool]:
    """True if a match begins where a name begins, and ends where it ends."""
    parts, ignore_case = list(tree), bool(tree.state.flags & re.IGNORECASE)
    _check(parts)

    def matches(name: str) -> bool:
        ends = _Walk(name, effort).ends(parts, ignore_case)
        return bool(ends & 1 << len(name) if to_the_end else ends)

    return matches


_INSIDE: dict[str, Callable[[Any], Iterable[Any]]] = {
    "BRANCH": lambda given: given[1],
    "SUBPATTERN": lambda given: [given[3]],
    "MAX_REPEAT": lambda given: [given[2]],
    "MIN_REPEAT": lambda given: [given[2]],
    "ASSERT": lambda given: [given[1]],
    "ASSERT_NOT": lambda given: [given[1]],
}
"""The parts inside a part."""
_SINGLE = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN"})
_OTHERS = frozenset({"AT", "FAILURE"})
_BEYOND = {
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}


def _check(parts: Iterable[_Op]) -> None:
    for op, given in parts:
        kind = str(op)
        if kind in _BEYOND:
            raise PatternRefused(f"has {_BEYOND[kind]}, which is not evaluated: write it without, or list the modules")
        if kind not in _INSIDE and kind not in _SINGLE | _OTHERS:
            raise PatternRefused(f"has {kind.lower()}, which is not evaluated: list the modules instead")
        if kind in ("ASSERT", "ASSERT_NOT") and given[0] < 0 and len(set(given[1].getwidth())) > 1:
            raise PatternMalformed("look-behind requires fixed-width pattern")
        for inner in _INSIDE.get(kind, lambda _: ())(given):
            _check(inner)


class _Walk:
    """Walk over one module name. Sets of positions are integers: bit i stands for the place before character i."""

    def __init__(self, name: str, effort: Effort) -> None:
        self._name, self._effort = name, effort
        self._all = (1 << (len(name) + 1)) - 1
        self._letters: dict[str, int] = {}
        for place, letter in enumerate(name):
            self._letters[letter] = self._letters.get(letter, 0) | 1 << place
        self._taken: dict[tuple[int, bool], int] = {}
        self._asserted: dict[int, int] = {}

    def ends(self, parts: list[_Op], ignore_case: bool) -> int:
        """End positions of the matches that begin at the first character."""
        return self._run(parts, 1, False, ignore_case)

    def _run(self, parts: Iterable[_Op], places: int, back: bool, fold: bool) -> int:
        """End positions of the parts that begin in ``places``; with ``back``, begin positions of those that end
        there."""
        for part in reversed(list(parts)) if back else parts:
            if not places:
                return 0
            places = self._step(part, places, back, fold)
        return places

    def _step(self, part: _Op, places: int, back: bool, fold: bool) -> int:
        self._effort.spend()
        op, given = part
        match str(op):
            case "BRANCH":
                found = 0
                for option in given[1]:
                    found |= self._run(option, places, back, fold)
                return found
            case "SUBPATTERN":
                _, added, removed, inner = given
                fold = (fold or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
                return self._run(inner, places, back, fold)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(given, places, back, fold)
            case "ASSERT" | "ASSERT_NOT":
                held = self._holds(part, fold)
                return places & (held if str(op) == "ASSERT" else self._all & ~held)
            case "AT":
                return places & self._at(str(given))
            case "FAILURE":
                return 0
        where = self._where(part, fold)
        return (places >> 1) & where if back else (places & where) << 1

    def _repeat(self, given: tuple[int, int, Iterable[_Op]], places: int, back: bool, fold: bool) -> int:
        fewest, most, inner = given
        once = self._once(list(inner), back, fold)
        for _ in range(fewest):
            further = once(places)
            if further == places:  # so it stays, however often
                break
            places = further
        found = fresh = places
        for _ in range(fewest, int(most)):
            fresh = once(fresh) & ~found
            if not fresh:
                break
            found |= fresh
        return found

    def _once(self, inner: list[_Op], back: bool, fold: bool) -> Callable[[int], int]:
        """Step over one repetition."""
        if len(inner) > 1 or str(inner[0][0]) not in _SINGLE:
            return lambda places: self._run(inner, places, back, fold)
        where = self._where(inner[0], fold)
        return (lambda places: (places >> 1) & where) if back else (lambda places: (places & where) << 1)

    def _holds(self, part: _Op, fold: bool) -> int:
        """Positions at which a lookaround's condition holds."""
        direction, inner = part[1]
        key = id(part) * 2 + fold
        if key not in self._asserted:
            self._asserted[key] = self._run(inner, self._all, direction > 0, fold)
        return self._asserted[key]

    def _at(self, kind: str) -> int:
        first, last = 1, 1 << len(self._name)
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return first
        if kind in ("AT_END", "AT_END_STRING"):
            return last
        word = [character.isalnum() or character == "_" for character in self._name]
        sides = zip([False, *word], [*word, False], strict=True)
        edges = sum(1 << place for place, (before, after) in enumerate(sides) if before != after)
        return edges if kind == "AT_BOUNDARY" else self._all & ~edges

    def _where(self, part: _Op, fold: bool) -> int:
        """Places, as bits, before which a part of one character takes the next one."""
        op, given = part
        if str(op) == "LITERAL" and not fold:
            return self._letters.get(chr(given), 0)
        key = id(part), fold
        if key not in self._taken:
            self._taken[key] = sum(places for letter, places in self._letters.items() if _takes(part, letter, fold))
        return self._taken[key]


def _takes(part: _Op, character: str, fold: bool) -> bool:
    op, given = part
    forms = {ord(form) for form in (character, *((character.lower(), character.upper()) if fold else ()))}
    match str(op):
        case "ANY":
            return True
        case "LITERAL":
            return given in forms
        case "NOT_LITERAL":
            return given not in forms
    negated = bool(given) and str(given[0][0]) == "NEGATE"
    return negated != any(_in(entry, character, forms) for entry in given[negated:])


def _in(entry: _Op, character: str, forms: set[int]) -> bool:
    op, given = entry
    match str(op):
        case "LITERAL":
            return given in forms
        case "RANGE":
            return any(given[0] <= form <= given[1] for form in forms)
    kind = str(given)
    holds = {
        "DIGIT": character.isdigit(),
        "SPACE": character.isspace(),
        "WORD": character.isalnum() or character == "_",
    }[kind.rsplit("_", 1)[1]]
    return holds != ("_NOT_" in kind)
