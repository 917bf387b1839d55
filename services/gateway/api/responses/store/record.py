"""A response as it is kept: the object, and the items that a response which continues it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.common.errors import NotFound
from services.gateway.api.responses.streaming.items import Data, new_item_id
from services.gateway.protocol.responses.items import InputItem, Item, ItemReference, MessageItem

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{16}")
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_UNKEPT = {"caller", "async_", "phase", "encrypted_content"}
_UNKEPT_OF_PARTS = ("cache_control", "prompt_cache_breakpoint")
"""What has no effect."""
ACTIVE = frozenset({"queued", "in_progress"})
"""States of a response that has not ended."""
CONTINUABLE = frozenset({"completed", "incomplete"})


@dataclass(slots=True)
class Record:
    """One stored response."""

    response: Data
    """Response as GET answers it."""
    items: list[Data] = field(default_factory=list)
    """What it was given, oldest first: what came before it and its own input, each with an id."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def whole(self) -> list[Data]:
        """What it was given and what it answered: what a response that continues it is given before its own input. A
        call that was cut off can be neither run nor read, and is left out."""
        return [*self.items, *self.said]

    @property
    def said(self) -> list[Data]:
        """What of its answer can be read again."""
        return [_readable(item) for item in self.response["output"] if not cut_call(item)]

    def item(self, item_id: str) -> Data | None:
        """One of its items, given or answered."""
        items = (*self.items, *map(_readable, self.response["output"]))
        return next((item for item in items if item["id"] == item_id), None)


def parsed(items: Sequence[Data]) -> list[Item]:
    """Stored items as a request has them."""
    # What is kept refers to nothing.
    return [item for item in _ITEMS.validate_python(items) if not isinstance(item, ItemReference)]


def checked_id(response_id: str, *, param: str = "response_id") -> str:
    """Returns an id that may be looked up.

    Raises:
        NotFound: no response can have it.
    """
    if not _ID.fullmatch(response_id):
        raise missing(response_id, param=param)
    return response_id


def missing(response_id: str, *, param: str = "response_id") -> NotFound:
    """The error of a response that is not kept."""
    return NotFound(
        f"no such response: {response_id[:80]!r}; responses are kept for a while only, and with store=true only",
        param=param,
    )


def response_of(item_id: str) -> str | None:
    """The response that an item is kept with; None: no item of ours has such an id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def given_items(given: str | Sequence[Item | None], response_id: str) -> list[Data]:
    """The input of a response as items, each with an id and a status."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    return [_described(item, response_id) for item in items if item is not None]


def _described(item: Item, response_id: str) -> Data:
    data: dict[str, Any] = item.model_dump(mode="json", exclude_none=True, exclude=_UNKEPT)
    kind = data["type"] = item.type or "message"
    data["status"] = "completed"
    match kind:
        case "message":
            if isinstance(data["content"], str):
                part = "output_text" if data["role"] == "assistant" else "input_text"
                data["content"] = [{"type": part, "text": data["content"]}]
            for part in data["content"]:
                for unkept in _UNKEPT_OF_PARTS:
                    part.pop(unkept, None)
                if part["type"] == "output_text":
                    part |= {"annotations": [], "logprobs": []}
        case "reasoning":
            data = {"summary": [], "content": [], **data}
    data.setdefault("id", new_item_id(_PREFIXES[kind], response_id))
    return data


def cut_call(item: Data) -> bool:
    """A call that can be neither run nor read."""
    return item["type"] in ("function_call", "custom_tool_call") and item["status"] == "incomplete"


def _readable(item: Data) -> Data:
    """An output item without what is of no use to a model: log-probabilities may be megabytes."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
