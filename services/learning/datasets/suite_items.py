"""Items of a suite, made of the held-out rows of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.evaluation.suites.spec import MAX_ITEMS, SuiteItem, SuiteSettings
from services.common.storage.ids import key_of
from services.learning.datasets.convert import examples_of
from services.learning.datasets.rows import Json, Row
from services.learning.datasets.spec import DatasetSplit

_GROUP = 32
"""Characters of a digest that name a group."""


def suite_items(dataset: str, rows: Iterable[Row], split: DatasetSplit, settings: SuiteSettings) -> list[SuiteItem]:
    """An item a prompt, with the answer that a job of kind sft would learn; rows that are split together are a group.
    Prompts that the scorer cannot score, such as those without a good answer, are left out.

    Args:
        dataset: "name@n", for messages.

    Raises:
        InvalidRequest: no prompt is left, or there are too many.
    """
    by_prompt: dict[str, list[Row]] = {}
    for row in (one.last_turn for one in rows):
        by_prompt.setdefault(row.prompt, []).append(row)
    items: list[SuiteItem] = []
    reason = "it has no held-out rows: make a version with a larger split.held_out, or of more rows"
    for name, those in by_prompt.items():
        try:
            item = SuiteItem.model_validate(_item(name, those, split))
        except ValidationError:
            reason = "its prompts do not end with a turn that can be answered"
            continue
        if (wrong := settings.scorer.wrong_item(item.reference)) is None:
            items.append(item)
        else:
            reason = wrong
    if not items:
        raise InvalidRequest(f"dataset: no item comes of {dataset}: {reason}", param="dataset")
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"dataset: {dataset} has {len(items)} held-out prompts, beyond the limit of {MAX_ITEMS} items: make a "
            "version with a smaller split.held_out",
            param="dataset",
        )
    return items


def _item(name: str, rows: list[Row], split: DatasetSplit) -> Json:
    item: Json = {
        "id": name[:16],
        "messages": rows[0].messages,
        "tools": rows[0].tools,
        "group": _group(rows[0], split),
    }
    item["marks"] = sorted({mark for row in rows for mark in row.marks})
    for example in examples_of("sft", rows):
        answer = example["messages"][-1] if "messages" in example else {"content": example["completion"]}
        if calls := answer.get("tool_calls"):
            item["expected_tool_calls"] = [_call(one) for one in calls]
        elif isinstance(answer.get("content"), str):
            item["expected"] = [answer["content"]]
    return item


def _call(call: Json) -> Json:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    return {"name": function["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _group(row: Row, split: DatasetSplit) -> str:
    return key_of(row.unit(split.by))[:_GROUP]
