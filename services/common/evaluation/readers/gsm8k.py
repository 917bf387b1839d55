"""GSM8K (Cobbe et al., arXiv 2110.14168): word problems. JSONL with `question` and `answer`, whose last line is
`#### ` and the number."""

from __future__ import annotations

from typing import Any

from services.common.evaluation.readers.published import PublishedSuite, items_of, text_of
from services.common.evaluation.suites.lines import BadLine, Row

_MARK = "####"
_SETTINGS = {"description": "GSM8K", "scorer": {"type": "numeric"}, "sampling": {"max_tokens": 512}}


def read_gsm8k(text: str) -> PublishedSuite:
    """Raises InvalidRequest: a line is not of this form; it is named."""
    return PublishedSuite(_SETTINGS, items_of(text, _item))


def _item(row: Row) -> dict[str, Any]:
    _, mark, number = text_of(row, "answer").rpartition(_MARK)
    if not mark or not number.strip():
        raise BadLine(f"answer: must end with {_MARK} and the number")
    return {"prompt": text_of(row, "question"), "expected": number.strip().replace(",", "")}
