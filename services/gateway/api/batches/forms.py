"""What a batch writes of its requests: OpenAI's two files, or the one of Anthropic's message batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic_core import to_json

from services.common.ids import ulid_of
from services.gateway.api.batches.internal_client import Answer
from services.gateway.api.batches.parts import Kind, Result
from services.gateway.core.batch_queue import MESSAGES, ClaimedBatch, LineError
from services.gateway.core.errors import error_payload

Unrun = Literal["expired", "cancelled"]
"""Why a request did not run."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file of results. ``field`` of the batch has its id, ``name`` is part of its own."""

    field: str
    name: str
    kinds: Sequence[Kind]


class Form(ABC):
    """How the results of one batch are written."""

    files: ClassVar[Sequence[ResultFile]]
    counted: ClassVar[Mapping[str, Kind]]
    """Fields of the batch that count results."""

    @abstractmethod
    def answered(self, number: int, custom_id: str, answer: Answer) -> Result:
        """The line of a request that ran."""

    @abstractmethod
    def not_run(self, number: int, custom_id: str, why: Unrun) -> Result:
        """The line of a request that did not run."""


class OpenAIForm(Form):
    """Lines with the status of the answer, in an output and an error file."""

    files = (ResultFile("output_file_id", "output", ("o",)), ResultFile("error_file_id", "error", ("e",)))
    counted: ClassVar[Mapping[str, Kind]] = {"completed": "o", "failed": "e"}
    _UNRUN: ClassVar[Mapping[Unrun, Mapping[str, str]]] = {
        "expired": {
            "code": "batch_expired",
            "message": "the request did not run before the completion window had passed",
        },
        "cancelled": {
            "code": "batch_cancelled",
            "message": "the batch was cancelled before the request had run",
        },
    }

    def __init__(self, claimed: ClaimedBatch) -> None:
        self._claimed = claimed

    def answered(self, number: int, custom_id: str, answer: Answer) -> Result:
        head = to_json({"id": self._id(number), "custom_id": custom_id})[:-1]
        response = b'"response":{"status_code":%d,"request_id":%s,"body":%s}' % (
            answer.status,
            to_json(answer.request_id),
            answer.body,
        )
        return Result(number, "o" if answer.status < 400 else "e", head + b"," + response + b',"error":null}')

    def not_run(self, number: int, custom_id: str, why: Unrun) -> Result:
        line = {"id": self._id(number), "custom_id": custom_id, "response": None, "error": self._UNRUN[why]}
        return Result(number, "e", to_json(line))

    def _id(self, number: int) -> str:
        """Id of a result and of its request: the same at every attempt."""
        created = int(self._claimed.job.created_at * 1000)
        return "batch_req_" + ulid_of(f"{self._claimed.id} {number}", created)


class MessagesForm(Form):
    """Lines with a `result` of one of four types, in one file."""

    files = (ResultFile("output_file_id", "results", ("o", "e", "c", "x")),)
    counted: ClassVar[Mapping[str, Kind]] = {"completed": "o", "failed": "e", "canceled": "c", "expired": "x"}

    def answered(self, number: int, custom_id: str, answer: Answer) -> Result:
        name, field, kind = ("succeeded", "message", "o") if answer.status < 400 else ("errored", "error", "e")
        head = to_json({"custom_id": custom_id, "result": {"type": name}})[:-2]
        return Result(number, "o" if kind == "o" else "e", b'%s,"%s":%s}}' % (head, field.encode(), answer.body))

    def not_run(self, number: int, custom_id: str, why: Unrun) -> Result:
        return Result(number, "x" if why == "expired" else "c", unrun_message(custom_id, why))


def unrun_message(custom_id: str, why: Unrun | LineError) -> bytes:
    """The line of a message that did not run, or that has no result because its batch failed."""
    if isinstance(why, LineError):
        error = error_payload(why.message, status=500, code=why.code, route=MESSAGES)
        result: dict[str, Any] = {"type": "errored", "error": error}
    else:
        result = {"type": "expired" if why == "expired" else "canceled"}
    return to_json({"custom_id": custom_id, "result": result})


def form_of(claimed: ClaimedBatch) -> Form:
    """Form of a batch's kind."""
    return MessagesForm() if claimed.spec.kind == "msgbatch" else OpenAIForm(claimed)
