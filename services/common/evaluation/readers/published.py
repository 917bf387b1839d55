"""A published set as a suite: its items and the settings that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.evaluation.suites.lines import BadLine, Row


@dataclass(frozen=True, slots=True)
class PublishedSuite:
    """What `POST /v1/eval/suites` takes, besides the name."""

    settings: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]


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
