"""MMLU (Hendrycks et al., arXiv 2009.03300) and sets of its form: multiple choice.

CSV without a header, as published: question, A, B, C, D, letter of the right one. Or JSONL, as data sets of that name
have it: `question`, `choices`, `answer` (an index from 0, or a letter), and `subject` if there is one.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.readers.published import PublishedSuite, list_of, text_of
from services.common.evaluation.suites.lines import BadLine, Row, each_line
from services.common.jobs.scorers.of_suites.likelihood import LETTERS

_SETTINGS = {"description": "MMLU", "scorer": {"type": "choice", "by": "letter"}}


def read_mmlu(text: str) -> PublishedSuite:
    """Raises InvalidRequest: a line is not of this form; it is named."""
    is_json = text.lstrip("\ufeff \n").startswith("{")
    return PublishedSuite(_SETTINGS, each_line(text, _item) if is_json else _from_csv(text))


def _item(row: Row) -> dict[str, Any]:
    choices = list_of(row, "choices")
    answer = row.value.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        answer = choices[answer]
    elif not isinstance(answer, str) or answer not in LETTERS[: len(choices)]:
        raise BadLine(f"answer: must be the index of a choice, from 0 to {len(choices) - 1}, or its letter")
    item = {"prompt": text_of(row, "question"), "choices": choices, "expected": answer}
    subject = row.value.get("subject")
    return item | ({"metadata": {"subject": subject}} if isinstance(subject, str) and subject else {})


def _from_csv(text: str) -> list[dict[str, Any]]:
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    items = []
    try:
        for cells in rows:
            if not cells:
                continue
            question, *choices, answer = cells
            if len(choices) < 2 or answer not in list(LETTERS[: len(choices)]):
                raise InvalidRequest(
                    f"line {rows.line_num}: must be a question, two or more choices and the letter of the right one",
                    param="jsonl",
                )
            items.append({"prompt": question, "choices": choices, "expected": answer})
    except csv.Error as error:
        raise InvalidRequest(f"line {rows.line_num}: is no CSV: {error}", param="jsonl") from error
    return items
