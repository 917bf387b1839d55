"""A published set as a suite: its items and the settings that belong to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.evaluation.suites.lines import BadLine, Row, each_line

Item: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedSuite:
    """What `POST /v1/eval/suites` takes, besides the name."""

    settings: Mapping[str, Any]
    items: Sequence[tuple[int, Item]]
    """Items with their lines in the file, of which no two are the same."""

    @property
    def jsonl(self) -> str:
        """The items, each on the line that it has in the file: what is wrong with one is named by that."""
        lines: list[str] = []
        for line, item in self.items:
            lines += [""] * (line - 1 - len(lines))
            lines.append(json.dumps(item, ensure_ascii=False))
        return "".join(f"{line}\n" for line in lines)


def items_of(text: str, item: Callable[[Row], Item]) -> list[tuple[int, Item]]:
    """Items of a JSONL file, with their lines. Raises InvalidRequest: a line is malformed; it is named."""
    return each_line(text, lambda row: (row.line, item(row)))


def text_of(row: Row, name: str) -> str:
    """A column that has to be a text. Raises BadLine."""
    value = row.value.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadLine(f"{name}: must be a text")
    return value


def list_of(row: Row, name: str) -> list[Any]:
    """A column that has to be a list. Raises BadLine."""
    value = row.value.get(name)
    if not isinstance(value, list):
        raise BadLine(f"{name}: must be a list")
    return value
