"""A response as it is kept: the object, and the items that a response which continues it needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.common.errors import NotFound
from services.gateway.responses.items import Data, new_id
from services.gateway.schemas.responses_items import InputItem, MessageItem

_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
ACTIVE = frozenset({"queued", "in_progress"})
"""Of a response that has not ended."""
CONTINUABLE = frozenset({"completed", "incomplete"})


@dataclass(slots=True)
class Record:
    """One stored response."""

    response: Data
    """As GET answers it."""
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
        return [*self.items, *(_readable(item) for item in self.response["output"] if not _cut_call(item))]


def parsed(items: Sequence[Data]) -> list[InputItem]:
    """Stored items as a request has them."""
    return _ITEMS.validate_python(items)


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


def given_items(given: str | Sequence[InputItem]) -> list[Data]:
    """The input of a request as items, each with an id and a status."""
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    return [_described(item) for item in items]


def _described(item: InputItem) -> Data:
    data: dict[str, Any] = item.model_dump(mode="json", exclude_none=True)
    data["type"] = item.type or "message"
    data["status"] = "completed"
    match data["type"]:
        case "message":
            if isinstance(data["content"], str):
                kind = "output_text" if data["role"] == "assistant" else "input_text"
                data["content"] = [{"type": kind, "text": data["content"]}]
            for part in data["content"]:
                if part["type"] == "output_text":
                    part |= {"annotations": [], "logprobs": []}
        case "reasoning":
            data = {"summary": [], "content": [], **data}
    data.setdefault("id", new_id({"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(data["type"], "fco")))
    return data


def _cut_call(item: Data) -> bool:
    return (item["type"], item["status"]) == ("function_call", "incomplete")


def _readable(item: Data) -> Data:
    """An output item without what is of no use to a model: log-probabilities may be megabytes."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
