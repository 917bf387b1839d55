r"""Regular expressions of JSON schemas (ECMA-262 in its Unicode mode), read into a tree.

What has no language of its own (back-references) is refused; what looks around is kept and written by terminals.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from services.common.json_schema.characters import (
    BLANKS,
    DIGITS,
    LINE_ENDS,
    WORDS,
    Characters,
    Ranges,
    UnknownProperty,
    check_property,
    complement,
    merged,
)

_DEEPEST = 64
_LARGEST_COUNT = 100_000
_CLASSES: dict[str, Ranges] = {"d": DIGITS, "w": WORDS, "s": BLANKS}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_SURROGATE_FIRST, _SURROGATE_SECOND = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class PatternError(ValueError):
    """A pattern is malformed, or asks for what is not supported; the message says what."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after another; empty: the empty text."""

    items: tuple[Tree, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same so many times; ``most`` None: any number."""

    item: Tree
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of the text."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the text."""


@dataclass(frozen=True, slots=True)
class Look:
    """Lookaround: what must, or must not, stand ahead or behind."""

    item: Tree
    ahead: bool
    negated: bool


Tree = Characters | Sequence | Choice | Repeat | Begin | End | Look
ANY: Final = Characters(negated=True)
"""Every character."""
_DOT = Characters(LINE_ENDS, negated=True)
_WORD = Characters(WORDS)


def _boundary(negated: bool) -> Tree:
    r"""``\b`` or ``\B``."""

    def sides(behind: bool, ahead: bool) -> Tree:
        return Sequence((Look(_WORD, False, not behind), Look(_WORD, True, not ahead)))

    if negated:
        return Choice((sides(True, True), sides(False, False)))
    return Choice((sides(True, False), sides(False, True)))


def parse(pattern: str) -> Tree:
    """
    Raises:
        PatternError: it cannot be read.
    """
    reader = _Reader(pattern)
    tree = reader.choice(0)
    if reader.rest:
        raise PatternError("there is a ) too many")
    return tree


def words(tree: Tree, most: int) -> list[str] | None:
    """The texts that a tree without anchors matches, if there are at most so many; None otherwise."""
    match tree:
        case Characters():
            count = sum(last - first + 1 for first, last in tree.ranges)
            if tree.properties or tree.negated or count > most:
                return None
            return [chr(code) for first, last in tree.ranges for code in range(first, last + 1)]
        case Sequence():
            return _joined([words(item, most) for item in tree.items], most)
        case Choice():
            found: dict[str, None] = {}
            for option in tree.options:
                texts = words(option, most)
                if texts is None:
                    return None
                found.update(dict.fromkeys(texts))
            return list(found) if len(found) <= most else None
        case Repeat():
            texts = words(tree.item, most)
            if tree.most is None or texts is None or tree.most > most:
                return None
            counts = [_joined([texts] * count, most) for count in range(tree.least, tree.most + 1)]
            if None in counts:
                return None
            alike = list(dict.fromkeys(text for each in counts if each is not None for text in each))
            return alike if len(alike) <= most else None
    return None


def _joined(parts: list[list[str] | None], most: int) -> list[str] | None:
    found = [""]
    for texts in parts:
        if texts is None or len(found) * len(texts) > most:
            return None
        found = [before + text for before in found for text in texts]
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class _Reader:
    pattern: str
    at: int = field(default=0)

    @property
    def rest(self) -> bool:
        return self.at < len(self.pattern)

    def _peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def _take(self, text: str) -> bool:
        if not self._peek(text):
            return False
        self.at += len(text)
        return True

    def _next(self) -> str:
        if not self.rest:
            raise PatternError("it ends too early")
        character = self.pattern[self.at]
        self.at += 1
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise PatternError("it has a lone surrogate")
        return character

    def choice(self, depth: int) -> Tree:
        if depth > _DEEPEST:
            raise PatternError(f"its groups are nested more than {_DEEPEST} deep")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Tree:
        items: list[Tree] = []
        while self.rest and not self._peek("|") and not self._peek(")"):
            items.append(self._repeated(self._item(depth)))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, depth: int) -> Tree:
        for opening, build in _GROUPS:
            if self._take(opening):
                item = self.choice(depth + 1)
                if not self._take(")"):
                    raise PatternError("a group is not closed")
                return build(item)
        if self._take("("):
            if self._peek("?"):
                if not self._take("?<"):
                    raise PatternError(f"the group ({self.pattern[self.at : self.at + 3]} is not supported")
                if ">" not in self.pattern[self.at :]:
                    raise PatternError("the name of a group is not closed")
                self.at = self.pattern.index(">", self.at) + 1
            item = self.choice(depth + 1)
            if not self._take(")"):
                raise PatternError("a group is not closed")
            return item
        character = self._next()
        match character:
            case "^":
                return Begin()
            case "$":
                return End()
            case ".":
                return _DOT
            case "[":
                return self._class()
            case "\\":
                if self._take("b"):
                    return _boundary(False)
                if self._take("B"):
                    return _boundary(True)
                return self._escape()
            case "*" | "+" | "?":
                raise PatternError(f"there is nothing for {character} to repeat")
        return _one(ord(character))

    def _repeated(self, item: Tree) -> Tree:
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, Begin | End | Look):
            raise PatternError("what looks around cannot be repeated")
        self._take("?")  # Lazy or not: the language is the same.
        if self._peek("+") or self._bounds() is not None:
            raise PatternError("a repetition cannot be repeated")
        least, most = bounds
        if max(least, most or 0) > _LARGEST_COUNT:
            raise PatternError(f"it repeats more than {_LARGEST_COUNT} times")
        if most is not None and most < least:
            raise PatternError(f"{{{least},{most}}} is out of order")
        return Repeat(item, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return least, most
        if not self._peek("{"):
            return None
        end = self.pattern.find("}", self.at)
        first, comma, second = self.pattern[self.at + 1 : max(end, 0)].partition(",")
        digits = first.isascii() and first.isdigit() and (not second or (second.isascii() and second.isdigit()))
        if end < 0 or not digits or len(first) > 9 or len(second) > 9:
            return None  # a brace as it stands
        self.at = end + 1
        return int(first), int(second) if second else None if comma else int(first)

    def _class(self) -> Characters:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[tuple[str, bool]] = []
        while not self._take("]"):
            first = self._member()
            ahead = self.pattern[self.at : self.at + 2]
            if first.single is not None and len(ahead) == 2 and ahead[0] == "-" and ahead[1] != "]":
                self.at += 1
                last = self._member()
                if last.single is not None:
                    if last.single < first.single:
                        raise PatternError("a range of a class is out of order")
                    ranges.append((first.single, last.single))
                    continue
                ranges.append((0x2D, 0x2D))
                ranges += last.ranges
                properties += last.properties
            ranges += first.ranges
            properties += first.properties
        return Characters(merged(ranges), tuple(dict.fromkeys(properties)), negated)

    def _member(self) -> Characters:
        character = self._next()
        if character != "\\":
            return _one(ord(character))
        return _one(0x08) if self._take("b") else self._escape()

    def _escape(self) -> Characters:
        """Characters of an escape, whose backslash is read already."""
        character = self._next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return Characters(ranges if character.islower() else complement(ranges))
        if character in "pP" and self._take("{"):
            end = self.pattern.find("}", self.at)
            name, self.at = self.pattern[self.at : max(end, 0)], end + 1
            try:
                check_property(name)
            except UnknownProperty:
                raise PatternError(f"the property \\p{{{name[:40]}}} of Unicode is not supported") from None
            return Characters(properties=((name, character == "P"),))
        if character in _CONTROLS:
            return _one(_CONTROLS[character])
        if character == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return _one(0)
        if character in "123456789k":
            raise PatternError(f"the back-reference \\{character} is no regular language")
        if character == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise PatternError(f"\\c{letter} is no control character")
            return _one(ord(letter) % 32)
        if character == "x":
            return _one(self._hex(2))
        if character == "u":
            return _one(self._unicode())
        if character.isalnum():
            raise PatternError(f"the escape \\{character} is not one of ECMA-262")
        return _one(ord(character))

    def _unicode(self) -> int:
        if self._take("{"):
            end = self.pattern.find("}", self.at)
            digits, self.at = self.pattern[self.at : max(end, 0)], end + 1
            try:
                code = int(digits, 16)
            except ValueError:
                code = -1
            if not 0 <= code <= 0x10FFFF:
                raise PatternError("\\u{…} is no character")
        else:
            code = self._hex(4)
            if code in _SURROGATE_FIRST and self._take("\\u"):
                second = self._hex(4)
                if second in _SURROGATE_SECOND:
                    return 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00)
        if 0xD800 <= code <= 0xDFFF:
            raise PatternError("it has a lone surrogate")
        return code

    def _hex(self, digits: int) -> int:
        text = self.pattern[self.at : self.at + digits]
        self.at += digits
        if len(text) != digits or any(character not in "0123456789abcdefABCDEF" for character in text):
            raise PatternError(f"an escape needs {digits} hexadecimal digits")
        return int(text, 16)


def _one(code: int) -> Characters:
    return Characters(((code, code),))


def _looking(ahead: bool, negated: bool) -> Callable[[Tree], Tree]:
    look = Look(Sequence(), ahead, negated)
    return lambda item: replace(look, item=item)


_GROUPS: tuple[tuple[str, Callable[[Tree], Tree]], ...] = (
    ("(?:", lambda item: item),
    ("(?=", _looking(True, False)),
    ("(?!", _looking(True, True)),
    ("(?<=", _looking(False, False)),
    ("(?<!", _looking(False, True)),
)
