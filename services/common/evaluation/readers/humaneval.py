"""HumanEval (Chen et al., arXiv 2107.03374) and sets of its form: functions to complete. JSONL with `prompt`, `test`,
`entry_point`, and `task_id` if there is one.

The function is asked for in a chat. The prompt stands in front of the answer's program, so that its imports and helpers
are there.
"""

from __future__ import annotations

from typing import Any

from services.common.evaluation.readers.published import PublishedSuite, items_of, text_of
from services.common.evaluation.suites.lines import BadLine, Row

_ASKED = "Complete this function. Answer with the whole function in one block of code.\n\n```python\n{prompt}\n```"
_SETTINGS = {"description": "HumanEval", "scorer": {"type": "python_tests"}, "sampling": {"max_tokens": 768}}


def read_humaneval(text: str) -> PublishedSuite:
    """Raises InvalidRequest: a line is not of this form; it is named."""
    return PublishedSuite(_SETTINGS, items_of(text, _item))


def _item(row: Row) -> dict[str, Any]:
    prompt, test, entry = text_of(row, "prompt"), text_of(row, "test"), text_of(row, "entry_point")
    if not entry.isidentifier():
        raise BadLine(f"entry_point: is {entry[:80]!r}, and must be the name of a function")
    item = {
        "prompt": _ASKED.format(prompt=prompt.strip("\n")),
        "tests": {"prelude": prompt, "code": f"{test}\n\ncheck({entry})\n"},
    }
    name = row.value.get("task_id")
    return item | ({"id": str(name)} if name is not None else {})
