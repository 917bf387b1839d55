"""IFEval (Zhou et al., arXiv 2311.07911): prompts with instructions that a program can verify. JSONL with `prompt`,
`instruction_id_list`, `kwargs` (one object an instruction), and `key` if there is one.

Prompts with an instruction that cannot be verified here are left out, and told.
"""

from __future__ import annotations

from typing import Any

from services.common.errors import InvalidRequest
from services.common.evaluation.readers.published import PublishedSuite, items_of, list_of, text_of
from services.common.evaluation.suites.lines import BadLine, Row

_DETECTED = "language:response_language"
_SETTINGS = {
    "description": "IFEval",
    "scorer": {"type": "instructions"},
    "sampling": {"max_tokens": 1280},
}


def read_ifeval(text: str) -> PublishedSuite:
    """Raises InvalidRequest: a line is not of this form; it is named."""
    items = items_of(text, _item)
    kept = [(line, item) for line, item in items if _DETECTED not in (one["id"] for one in item["instructions"])]
    if not kept:
        raise InvalidRequest(f"all prompts ask for {_DETECTED}, which cannot be verified here", param="jsonl")
    left_out = len(items) - len(kept)
    note = f", without {left_out} prompts that ask for a language, which is not verified here" if left_out else ""
    return PublishedSuite({**_SETTINGS, "description": f"{_SETTINGS['description']}{note}"}, kept)


def _item(row: Row) -> dict[str, Any]:
    names, given = list_of(row, "instruction_id_list"), list_of(row, "kwargs")
    if len(names) != len(given) or not names:
        raise BadLine(f"instruction_id_list has {len(names)} entries and kwargs {len(given)}: one each, at least one")
    if not all(isinstance(one, dict) for one in given):
        raise BadLine("kwargs: must be a list of objects")
    # Data sets write every argument of every instruction, null where it has none.
    instructions = [
        {"id": name, "kwargs": {key: value for key, value in one.items() if value is not None}}
        for name, one in zip(names, given, strict=True)
    ]
    key = row.value.get("key")
    item = {"prompt": text_of(row, "prompt"), "instructions": instructions}
    return item | ({} if key is None else {"id": str(key)})
