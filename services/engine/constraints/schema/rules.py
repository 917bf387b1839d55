"""Rules of a grammar as data; rules that produce no text are removed before the grammar is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.common.json_schema.terminals import literal


@dataclass(frozen=True, slots=True)
class Literal:
    """Literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Terminal:
    """Terminal of Lark, which has at least one text."""

    text: str


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON schema of numbers that only llguidance's own lowering can write; there is at least one."""

    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Reference to another rule, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Sequence of expressions."""

    items: tuple[Expression, ...] = ()


@dataclass(frozen=True, slots=True)
class OneOf:
    """Alternatives; without any it produces no text."""

    options: tuple[Expression, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """Repetition; ``most`` None: any number of times."""

    item: Expression
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Permutation:
    """Different items in any order, with a separator between two of them."""

    items: tuple[Literal, ...]
    between: Literal
    least: int
    most: int


Expression = Literal | Terminal | Schema | Rule | Chain | OneOf | Times | Permutation
NOTHING = OneOf()
MOST_PERMUTED = 32


def chain(*items: Expression) -> Chain:
    return Chain(items)


def maybe(*items: Expression) -> Times:
    return Times(Chain(items), 0, 1)


def productive(rules: dict[str, Expression]) -> set[str]:
    """Names of the rules that produce a text."""
    found: set[str] = set()
    users: dict[str, set[str]] = {}
    for name, expression in rules.items():
        for used in _used(expression):
            users.setdefault(used, set()).add(name)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in found and _comes(rules[name], found):
            found.add(name)
            waiting += users.get(name, ())
    return found


def _used(expression: Expression) -> Iterator[str]:
    match expression:
        case Rule():
            yield expression.name
        case Chain():
            for item in expression.items:
                yield from _used(item)
        case OneOf():
            for option in expression.options:
                yield from _used(option)
        case Times():
            yield from _used(expression.item)


def _comes(expression: Expression, known: set[str]) -> bool:
    match expression:
        case Rule():
            return expression.name in known
        case Chain():
            return all(_comes(item, known) for item in expression.items)
        case OneOf():
            return any(_comes(option, known) for option in expression.options)
        case Times():
            return expression.least == 0 or _comes(expression.item, known)
    return True


class Writer:
    """Writes the rules that a start rule needs as Lark.

    Args:
        rules: rules by name.
    """

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._productive = productive(rules)
        self._terminals: dict[str, str] = {}
        self._permutations: dict[Permutation, str] = {}

    def lark(self, first: str) -> str | None:
        """Grammar with the start rule `start`; None: the first rule produces no text."""
        if first not in self._productive:
            return None
        lines = [f"start: {first}"]
        written, waiting = {first}, [first]
        while waiting:
            name = waiting.pop()
            lines.append(f"{name}: {self._written(self._rules[name])}")
            for used in _used(self._rules[name]):
                if used in self._productive and used not in written:
                    written.add(used)
                    waiting.append(used)
        lines += self._permuting()
        return "\n".join([*lines, *(f"{name}: {text}" for text, name in self._terminals.items())]) + "\n"

    def _written(self, expression: Expression) -> str:
        match expression:
            case Literal():
                return literal(expression.text)
            case Terminal():
                return self._terminal(expression.text)
            case Schema():
                return f"%json {expression.text}"
            case Rule():
                return expression.name
            case Chain():
                return " ".join(text for item in expression.items if (text := self._written(item)) != '""') or '""'
            case OneOf():
                options = [self._written(option) for option in expression.options if _comes(option, self._productive)]
                return options[0] if len(options) == 1 else f"({' | '.join(dict.fromkeys(options))})"
            case Times():
                return self._times(expression)
            case Permutation():
                return self._permutations.setdefault(expression, f"p{len(self._permutations)}")

    def _times(self, times: Times) -> str:
        if times.most == 0 or not _comes(times.item, self._productive):
            return '""'
        item = f"({self._written(times.item)})"
        match times.least, times.most:
            case 0, None:
                return f"{item}*"
            case 0, 1:
                return f"{item}?"
            case 1, 1:
                return item
        return f"{item}{{{times.least},{'' if times.most is None else times.most}}}"

    def _terminal(self, text: str) -> str:
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def _permuting(self) -> Iterable[str]:
        for permutation, name in self._permutations.items():
            between = self._written(permutation.between)
            items = [self._written(item) for item in permutation.items]
            first = [f"{item} {name}n::{1 << place:#x}" for place, item in enumerate(items)]
            if permutation.least == 0:
                first.append('""')
            yield f"{name}: {' | '.join(first)}"
            more = [
                f"{between} {item} {name}n::set_bit({place}) "
                f"%if and(bit_clear({place}), bit_count_lt(_, {permutation.most}))"
                for place, item in enumerate(items)
            ]
            yield f'{name}n::_: "" %if bit_count_ge(_, {permutation.least})\n  | ' + "\n  | ".join(more)
