"""Lines of a suite in JSONL: every one is checked, and what is wrong is named by line and field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.spec import MAX_ITEMS, SuiteItem, SuiteSettings
from services.common.validation.errors import problem
from services.common.validation.json_text import parsed_json

FIELD = "jsonl"
_TOLD = 5
"""Most malformed lines that one message tells."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """JSON object of a line; lines count from 1, with empty ones, as in editors."""

    line: int
    value: Mapping[str, Any]


class BadLine(Exception):
    """A line that is not what it should be; says why."""


def read_suite(jsonl: str, settings: SuiteSettings) -> list[SuiteItem]:
    """Items of a suite, one a line.

    Raises:
        InvalidRequest: lines are malformed, two items have one id, the scorer cannot score an item, or there are no
            items or too many.
    """
    seen: dict[str, int] = {}

    def item(row: Row) -> SuiteItem:
        found = parsed(SuiteItem, row)
        named = found if found.id else found.model_copy(update={"id": str(row.line)})
        first = seen.setdefault(named.id, row.line)
        if first != row.line:
            raise BadLine(f"id: {named.id[:80]!r} is that of line {first} as well: each item needs one of its own")
        if reason := settings.scorer.wrong_item(named.reference):
            raise BadLine(reason)
        return named

    return each_line(jsonl, item)


def parsed(model: type[M], row: Row) -> M:
    """The row as a model. Raises BadLine, with the field."""
    try:
        return model.model_validate(row.value)
    except ValidationError as error:
        raise BadLine(problem(error, model, row.value)) from error


def each_line(jsonl: str, work: Callable[[Row], T]) -> list[T]:
    """Results of ``work`` for every line.

    Raises:
        InvalidRequest: lines are malformed, of which the first ones are named; or there are none, or too many.
    """
    found: list[T] = []
    wrong: list[str] = []
    for line, row in _rows(jsonl):
        if len(found) + len(wrong) == MAX_ITEMS:
            raise InvalidRequest(f"{FIELD}: line {line} is beyond the limit of {MAX_ITEMS} items", param=FIELD)
        try:
            if isinstance(row, BadLine):
                raise row
            found.append(work(row))
        except BadLine as error:
            wrong.append(f"line {line}: {error}")
    if wrong:
        more = f"; {len(wrong) - _TOLD} more lines are malformed" if len(wrong) > _TOLD else ""
        raise InvalidRequest(f"{FIELD}: {'; '.join(wrong[:_TOLD])}{more}", param=FIELD)
    if not found:
        raise InvalidRequest(f"{FIELD}: has no lines, and a suite needs items", param=FIELD)
    return found


def _rows(jsonl: str) -> Iterator[tuple[int, Row | BadLine]]:
    # Lines end with a line feed and nothing else: the other line ends of Unicode may stand inside of strings.
    for line, text in enumerate(jsonl.removeprefix("\ufeff").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            value: Any = parsed_json(text, allow_inf_nan=False)
        except ValueError as error:
            reason = str(error).replace(" at line 1 column ", " at column ")
            yield line, BadLine(f"is not JSON: {reason[:200]}")
            continue
        yield line, Row(line, value) if isinstance(value, dict) else BadLine("must be a JSON object, an item a line")
