"""Suites out of training files: a part of the rows is held out for evaluation, whole groups at a time.

Which rows those are follows from the rows and the seed alone, so that whoever has the file can leave them out of the
training: they are named by their lines. Groups are ordered by a digest, hence a file that grows keeps most of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from pydantic import Field

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.lines import BadLine, Row, each_line, parsed
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.jobs.fields.messages import Message, as_turns
from services.common.jobs.kinds.sft import SftExample
from services.common.validation.strict_models import SentModel


class TrainingSplit(SentModel):
    """Part of a training file that becomes a suite: rows as jobs of kind sft learn from."""

    fraction: float = Field(0.1, gt=0, lt=1)
    """Share of the rows that is held out. At least one group is, and at least one is left."""
    seed: int = Field(0, ge=0, lt=2**63)
    group_by: str | None = Field(None, min_length=1, max_length=200)
    """Field of the rows that names their group; the field is no part of the example. None: rows with the same prompt
    are a group."""


def held_out_items(jsonl: str, split: TrainingSplit, settings: SuiteSettings) -> list[SuiteItem]:
    """Items of the rows that are held out, in the order of the file; each has "line-{number}" as its id.

    Raises:
        InvalidRequest: lines are malformed or have no answer to compare with, or all are of one group.
    """

    def item(row: Row) -> SuiteItem:
        found = _item(row, split.group_by)
        if reason := settings.scorer.wrong_item(found.reference):
            raise BadLine(reason)
        return found

    items = each_line(jsonl, item)
    held = _held_groups(items, split)
    return [item for item in items if item.group in held]


def _held_groups(items: Sequence[SuiteItem], split: TrainingSplit) -> set[str]:
    sizes: dict[str, int] = {}
    for item in items:
        group = item.group or ""
        sizes[group] = sizes.get(group, 0) + 1
    if len(sizes) < 2:
        raise InvalidRequest(
            "split: all rows are of one group, and a group is not divided: give more rows, or another group_by",
            param="split",
        )
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{split.seed}\0{group}".encode()).digest())
    wanted = split.fraction * len(items)
    held: set[str] = set()
    count = 0
    for group in order[:-1]:
        if held and count + sizes[group] / 2 > wanted:
            break
        held.add(group)
        count += sizes[group]
    return held


def _item(row: Row, group_by: str | None) -> SuiteItem:
    fields = dict(row.value)
    group = None
    if group_by is not None:
        group = fields.pop(group_by, None)
        if isinstance(group, bool) or not isinstance(group, str | int):
            raise BadLine(f"{group_by}: must be the name of the row's group, a text or an integer")
    example = parsed(SftExample, Row(row.line, fields))
    asked, answer = _asked(example)
    if group is None:
        turns = json.dumps(as_turns(asked), sort_keys=True, ensure_ascii=False)
        group = hashlib.sha256(turns.encode()).hexdigest()[:32]
    item = {
        "id": f"line-{row.line}",
        "messages" if isinstance(asked, list) else "prompt": asked,
        "tools": example.tools,
        "expected": [answer],
        "group": str(group),
    }
    return parsed(SuiteItem, Row(row.line, item))


def _asked(example: SftExample) -> tuple[str | list[Message], str]:
    """Prompt and answer of an example. Raises BadLine: it has none."""
    if example.prompt is not None and example.completion is not None:
        return example.prompt, example.completion
    if example.trajectory is not None:
        raise BadLine("trajectory: has no one answer to compare with; give prompt and completion, or messages")
    if example.messages is None:
        raise BadLine("text: a plain text asks nothing; give prompt and completion, or messages")
    *asked, last = example.messages
    if last.role != "assistant" or not asked:
        raise BadLine("messages: must end with the assistant's answer behind what it answers")
    answer = last.turn["content"]
    if not answer:
        raise BadLine("messages: the last turn has no content to compare with")
    return asked, str(answer)
