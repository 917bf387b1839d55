"""Results of a batch: written as lines, collected in memory, and kept in parts while the batch runs.

The lines are those of OpenAI's two files, or of the one file of Anthropic's message batches.

Parts are numbered objects in the object store, and they alone say what is done. A part is created only if its number is
free. Two gateways that both believe they own a batch therefore cannot both write part n: the later one sees what the
earlier wrote, or that it has lost the batch. A line of a part is `{line number} {kind} {JSON of the result}`; the
numbers tell what is done, the kinds which file a result goes to.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from pydantic_core import to_json

from services.common.storage.ids import ulid_of
from services.common.storage.object_store import ObjectStore
from services.gateway.api.batches.internal_client import Answer
from services.gateway.core.batch_queue import MESSAGES, ClaimedBatch, LineError
from services.gateway.core.errors import error_payload

ROOT = "batches/"
Kind = Literal["o", "e", "c", "x"]
"""Kind of a result: output or error; in message batches also canceled or expired before the request ran."""


@dataclass(slots=True)
class Done:
    """Requests of a batch whose results are in its parts."""

    lines: set[int] = field(default_factory=set)
    kinds: Counter[Kind] = field(default_factory=Counter)
    """Number of results of each kind."""
    parts: int = 0

    def add(self, number: int, kind: Kind) -> None:
        """Counts one more result."""
        self.lines.add(number)
        self.kinds[kind] += 1


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one request."""

    number: int
    kind: Kind
    json: bytes
    """Line of the output or error file, without its line end."""

    def encode(self) -> bytes:
        return b"%d %s %s\n" % (self.number, self.kind.encode(), self.json)


class Parts:
    """The parts of one batch. Every method blocks and may raise Unavailable."""

    def __init__(self, store: ObjectStore, batch_id: str) -> None:
        self._store = store
        self._prefix = f"{ROOT}{batch_id}/"

    def read(self, done: Done) -> None:
        """Adds the parts that ``done`` does not know yet."""
        for number in range(done.parts, len(self._store.list(self._prefix))):
            for line, kind, _ in self._results(number):
                done.add(line, cast(Kind, kind.decode()))
            done.parts = number + 1

    def write(self, number: int, data: bytes) -> None:
        """Writes a part. Raises PreconditionFailed: there is one with this number."""
        self._store.put(self._key(number), data, if_absent=True)

    def content(self, kinds: Sequence[Kind], parts: int) -> Iterator[bytes]:
        """The results of some kinds in the first ``parts`` parts, one block a part."""
        wanted = {kind.encode() for kind in kinds}
        for number in range(parts):
            yield b"".join(result + b"\n" for _, found, result in self._results(number) if found in wanted)

    def discard(self) -> None:
        """Removes all parts."""
        self._store.delete_prefix(self._prefix)

    def _results(self, number: int) -> Iterator[tuple[int, bytes, bytes]]:
        for text in self._store.get(self._key(number)).data.split(b"\n")[:-1]:
            line, kind, result = text.split(b" ", 2)
            yield int(line), kind, result

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:06d}"


PART_BYTES = 4 * 2**20
_PART_LINES = 1000
_PART_SECONDS = (1.0, 60.0)
"""Shortest and longest time that a result waits to be stored. Between them it waits a hundredth of the time that the
batch has run: a longer batch writes fewer parts a minute, and loses more if its gateway dies."""


class Buffer:
    """Results that are not stored yet."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._oldest: float | None = None
        self._bytes = 0
        self.results: list[Result] = []
        self.room = asyncio.Event()
        """Event that is set while the buffer has room. Requests wait for it, so that results do not fill the memory
        while the store is away."""
        self.room.set()

    def add(self, result: Result) -> None:
        self._oldest = self._oldest or time.monotonic()
        self._bytes += len(result.json)
        self.results.append(result)
        if self.full:
            self.room.clear()

    def take(self) -> list[Result]:
        """All of them, which are somebody else's from now on."""
        taken = self.results
        self._oldest, self._bytes, self.results = None, 0, []
        self.room.set()
        return taken

    @property
    def full(self) -> bool:
        """True if the results are as many, or as large, as one part holds."""
        return self._bytes >= PART_BYTES or len(self.results) >= _PART_LINES

    @property
    def due(self) -> bool:
        """True if the results are to be stored now: the buffer is full, or the oldest has waited long enough."""
        if self._oldest is None:
            return False
        now = time.monotonic()
        youngest, oldest = _PART_SECONDS
        return self.full or now - self._oldest >= min(max((now - self._began) / 100, youngest), oldest)


Unrun = Literal["expired", "cancelled"]
"""Reason why a request did not run."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """File of results. ``field`` is the batch's field with the id of the file, ``name`` is part of the file's name."""

    field: str
    name: str
    kinds: Sequence[Kind]


class Form(ABC):
    """Form in which the results of one batch are written."""

    files: ClassVar[Sequence[ResultFile]]
    counted: ClassVar[Mapping[str, Kind]]
    """Fields of the batch that count results, each with the kind that it counts."""

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
    """Form of the results of a batch, by its kind."""
    return MessagesForm() if claimed.spec.kind == "msgbatch" else OpenAIForm(claimed)
