"""Sets of characters of regular expressions, written as classes of Rust's regex crate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range; ascending, with gaps between."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
DIGITS: Ranges = ((0x30, 0x39),)
WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
BLANKS: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
r"""ECMA-262's ``\s``: WhiteSpace and LineTerminator, section 22.2.2.9."""
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that stand escaped in a string of JSON."""
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}

_CATEGORY = re.compile(r"(?:(?:gc|General_Category)=)?(\w+)", re.ASCII)
_SCRIPT = re.compile(r"(?:sc|scx|Script|Script_Extensions)=\w+", re.ASCII)
_WITH_CONTROLS = frozenset({"C", "Other", "Cc", "Control", "cntrl"})
_WITH_PUNCTUATION = frozenset({"P", "Punctuation", "punct", "Po", "Other_Punctuation"})
_WITH_ALL = frozenset({"Any", "ASCII", "Assigned"})
_NAMES_WITH_NONE = """
    L Letter LC Cased_Letter Lu Uppercase_Letter Ll Lowercase_Letter Lt Titlecase_Letter Lm Modifier_Letter Lo
    Other_Letter M Mark Combining_Mark Mn Nonspacing_Mark Mc Spacing_Mark Me Enclosing_Mark N Number Nd Decimal_Number
    digit Nl Letter_Number No Other_Number Pc Connector_Punctuation Pd Dash_Punctuation Ps Open_Punctuation Pe
    Close_Punctuation Pi Initial_Punctuation Pf Final_Punctuation S Symbol Sm Math_Symbol Sc Currency_Symbol Sk
    Modifier_Symbol So Other_Symbol Z Separator Zs Space_Separator Zl Line_Separator Zp Paragraph_Separator Cf Format Co
    Private_Use Alphabetic Alpha Lowercase Lower Uppercase Upper ASCII_Hex_Digit AHex Hex_Digit Hex ID_Start IDS
    ID_Continue IDC XID_Start XIDS XID_Continue XIDC Ideographic Ideo Math Emoji Emoji_Component EComp Emoji_Modifier
    EMod Emoji_Modifier_Base EBase Emoji_Presentation EPres Extended_Pictographic ExtPict Variation_Selector VS
    Regional_Indicator RI
"""
_WITH_NONE = frozenset(_NAMES_WITH_NONE.split())


class UnknownProperty(ValueError):
    """A property of Unicode that is not known here."""


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    found: list[tuple[int, int]] = []
    at = 0
    for first, last in merged([*ranges, _SURROGATES]):
        if first > at:
            found.append((at, first - 1))
        at = last + 1
    if at <= _LAST:
        found.append((at, _LAST))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Characters:
    """A set of characters.

    Args:
        ranges: its members.
        properties: of Unicode, whose characters are members too, each with whether it is negated; known to
            ``check_property``.
        negated: all others are the members.
    """

    ranges: Ranges = ()
    properties: tuple[tuple[str, bool], ...] = ()
    negated: bool = False

    def __contains__(self, code: int) -> bool:
        """Only of characters that JSON escapes, whose properties are known."""
        found = any(first <= code <= last for first, last in self.ranges) or any(
            _has(name, code) != negated for name, negated in self.properties
        )
        return found != self.negated

    @property
    def single(self) -> int | None:
        """The member, if it is known to be the only one."""
        if self.properties or self.negated or len(self.ranges) != 1 or self.ranges[0][0] != self.ranges[0][1]:
            return None
        return self.ranges[0][0]

    def expression(self, *, quoted: bool) -> str:
        """A regular expression of its members, one at a time; as they stand in a string of JSON if ``quoted``, where
        each has one spelling."""
        escaped = [code for first, last in ESCAPED for code in range(first, last + 1) if code in self]
        if not quoted or (not escaped and not self.properties and not self.negated):
            return self._class("")
        parts = [] if self._only_escaped else [self._class(f"--[{_written(ESCAPED)}]")]
        return f"(?:{'|'.join(parts + _escapes(escaped))})"

    @property
    def _only_escaped(self) -> bool:
        inside = all(any(low <= first and last <= high for low, high in ESCAPED) for first, last in self.ranges)
        return inside and not self.properties and not self.negated

    def _class(self, less: str) -> str:
        members = _written(self.ranges) + "".join(
            f"\\{'P' if negated else 'p'}{{{name}}}" for name, negated in self.properties
        )
        negated = self.negated
        if not members:
            members, negated = r"\x{0}-\x{10FFFF}", not negated
        written = f"[{'^' if negated else ''}{members}]"
        return f"[{written}{less}]" if less else written


def check_property(name: str) -> None:
    r"""
    Raises:
        UnknownProperty: ``\p{name}`` is none whose members among the escaped characters are known.
    """
    _has(name, 0)


def _has(name: str, code: int) -> bool:
    if _SCRIPT.fullmatch(name):
        return name.partition("=")[2] in ("Common", "Zyyy")
    found = _CATEGORY.fullmatch(name)
    base = found[1] if found else ""
    if base in _WITH_CONTROLS:
        return code < 0x20
    if base in _WITH_PUNCTUATION:
        return code in (0x22, 0x5C)
    if base in _WITH_ALL:
        return True
    if base in ("White_Space", "space"):
        return 0x09 <= code <= 0x0D
    if base in _WITH_NONE:
        return False
    raise UnknownProperty(name)


def _written(ranges: Ranges) -> str:
    parts = []
    for first, last in ranges:
        parts += [_code(first), "" if first == last else f"-{_code(last)}"]
    return "".join(parts)


def _code(code: int) -> str:
    text = chr(code)
    return text if text.isascii() and text.isalnum() else f"\\x{{{code:x}}}"


def _escapes(codes: list[int]) -> list[str]:
    """Expressions of characters that JSON escapes, each in its shortest spelling."""
    short = "".join("\\\\" if code == 0x5C else _SHORT[code] for code in codes if code in _SHORT)
    found = [rf"\\[{short}]"] if short else []
    for first in "01":
        last = "".join(f"{code:02x}"[1] for code in codes if code not in _SHORT and f"{code:02x}"[0] == first)
        if last:
            found.append(rf"\\u00{first}[{last}]")
    return found
