"""MMLU (Hendrycks et al., arXiv 2009.03300) and sets of its form: multiple choice.

CSV without a header, as published: question, A, B, C, D, letter of the right one. Or JSONL, as data sets of that name
have it: `question`, `choices`, `answer` (an index from 0, or a letter), and `subject` if there is one.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.readers.published import Item, PublishedSuite, items_of, list_of, text_of
from services.common.evaluation.suites.lines import BadLine, Row
from services.common.jobs.scorers.of_suites.likelihood import LETTERS

_SETTINGS = {"description": "MMLU", "scorer": {"type": "choice", "by": "letter"}}


def read_mmlu(text: str) -> PublishedSuite:
    """Raises InvalidRequest: a line is not of this form; it is named."""
    is_json = text.lstrip("\ufeff \n").startswith("{")
    return PublishedSuite(_SETTINGS, items_of(text, _item) if is_json else _from_csv(text))


def _item(row: Row) -> dict[str, Any]:
    choices = list_of(row, "choices")
    answer = row.value.get("answer")
    place = _place(answer, len(choices)) if isinstance(answer, str) else answer
    if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(choices):
        raise BadLine(f"answer: must be the index of a choice, from 0 to {len(choices) - 1}, or its letter")
    item = {"prompt": text_of(row, "question"), "choices": choices, "expected": choices[place]}
    subject = row.value.get("subject")
    return item | ({"metadata": {"subject": subject}} if isinstance(subject, str) and subject else {})


def _place(letter: str, choices: int) -> int | None:
    """Place of the choice with a letter; None: there is none. Files name choices by place, and suites first by their
    texts, of which one may be a letter itself."""
    known = list(LETTERS[:choices])
    return known.index(letter) if letter in known else None


def _from_csv(text: str) -> list[tuple[int, Item]]:
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    items: list[tuple[int, Item]] = []
    try:
        for cells in rows:
            if not cells:
                continue
            question, *choices, answer = cells
            place = _place(answer, len(choices))
            if len(choices) < 2 or place is None:
                raise InvalidRequest(
                    f"line {rows.line_num}: must be a question, two or more choices and the letter of the right one",
                    param="jsonl",
                )
            items.append((rows.line_num, {"prompt": question, "choices": choices, "expected": choices[place]}))
    except csv.Error as error:
        raise InvalidRequest(f"line {rows.line_num}: is no CSV: {error}", param="jsonl") from error
    return items
