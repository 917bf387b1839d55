"""Names and labels in a PromQL expression. promtool says whether it parses; here is what it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\d[\d.]*(?:[eE][+-]?\d+)?[a-z]*)"""
    r"""|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<operator>=~|!~|!=|>=|<=|==|[-+*/%^=<>(){},])|(?P<space>\s+|#[^\n]*)"""
)
_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
"""Keywords that a list of labels follows."""
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", *_LISTS})
_MATCHES = ("=", "!=", "=~", "!~")


@dataclass(frozen=True, slots=True)
class Selector:
    """Selector: a series that an expression asks for."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(label for label, _, _ in self.matchers)


@dataclass(frozen=True, slots=True)
class Asked:
    """Selectors and labels of an expression."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]
    """Labels in its lists after by, on and the like."""


def asked(expression: str) -> Asked:
    """Reads an expression that promtool accepts.

    Raises:
        ValueError: it has something that PromQL has not.
    """
    tokens = list(_tokens(expression))
    selectors: list[Selector] = []
    grouped: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name":
            continue
        if text in _LISTS:
            end = tokens.index(("operator", ")"), at)
            grouped.update(word for token, word in tokens[at:end] if token == "name")
            at = end + 1
        elif text not in _WORDS and following != "(" and not _is_aggregation(tokens, at):
            end = tokens.index(("operator", "}"), at) if following == "{" else at
            selectors.append(Selector(text, tuple(_matchers(tokens[at:end]))))
            at = end
    return Asked(tuple(selectors), frozenset(grouped))


def _is_aggregation(tokens: list[tuple[str, str]], at: int) -> bool:
    """True if the word before ``at`` is a grouping keyword, as in `sum by (le) (...)`."""
    return at < len(tokens) and tokens[at][1] in ("by", "without")


def _matchers(tokens: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    for (kind, label), (_, operator), (_, value) in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if kind == "name" and operator in _MATCHES:
            yield label, operator, value[1:-1]


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"not PromQL from here on: {expression[at : at + 40]!r}")
        if match.lastgroup != "space":
            yield match.lastgroup, match[0]
        at = match.end()
