"""One row of a data set: what was asked and answered, and how good that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict

from services.common.evaluation.contamination.texts import ReadText, Turn
from services.common.storage.ids import key_of
from services.common.validation.strict_models import StrictModel
from services.learning.request_log.index import answer_mark, user_marks

Json = dict[str, Any]


class Row(StrictModel):
    """A row. Messages are those of the chat API."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    source: Literal["feedback", "logged", "file"]
    answer_id: str | None = None
    """Id of the choice."""
    at: float = 0.0
    """Unix seconds at which the request ended."""
    key_id: str = ""
    user: str | None = None
    """Who asked."""
    session: str | None = None
    said_by: tuple[str, ...] = ()
    """Users who said something of it."""
    version: str | None = None
    messages: list[Json]
    tools: list[Json] | None = None
    answer: Json | None = None
    """The assistant's message that was given."""
    better: str | None = None
    """Text that is better than `worse`: a correction, or the answer that was preferred."""
    worse: str | None = None
    rating: float | None = None
    """Mean of what was said, -1 to 1."""
    opinions: int = 0
    labels: tuple[str, ...] = ()
    temperature: float = 1.0
    """At which the answer was sampled."""
    truncated: bool = False
    """The answer ended at its token limit."""
    turn_ids: tuple[str, ...] = ()
    """Ids of the choices of its trajectory."""
    trajectory: Json | None = None
    """A whole session, as jobs take it: by its segments, with its rewards. `messages` are those of its last request."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None

    @property
    def content(self) -> str:
        """Digest of what a model would learn from it."""
        # A session is one row, also where another has the same words.
        session = [] if self.trajectory is None else [self.turn_ids]
        return digest([self.messages, self.tools, self.answer, self.better, self.worse, *session])

    @property
    def prompt(self) -> str:
        """Digest of what was asked."""
        return digest([self.messages, self.tools])

    @property
    def beginning(self) -> str:
        """Digest of what makes rows comparable: what was asked, or what a trajectory begins with."""
        return self.prompt if self.trajectory is None else digest(self.trajectory["segments"][0]["token_ids"])

    @property
    def last_turn(self) -> Row:
        """The row by its last answer alone, without trajectory."""
        return self if self.trajectory is None else self.model_copy(update={"trajectory": None})

    def unit(self, by: Literal["user", "session", "request"]) -> str:
        """Name of what stays together when rows are split."""
        request = self.answer_id.partition(":")[0] if self.answer_id else self.content
        if self.trajectory is not None and self.session is not None:
            request = self.session  # it has a last answer until the session goes on
        user = self.user or (self.said_by[0] if self.said_by else None)
        return {"user": user or self.session, "session": self.session, "request": None}[by] or request

    @property
    def users(self) -> frozenset[str]:
        """Digests of everybody that it comes from."""
        return frozenset(key_of(one) for one in (self.user, *self.said_by) if one is not None)

    @property
    def marks(self) -> frozenset[str]:
        """Marks of erasure that mean it."""
        found = {mark for user in self.users for mark in user_marks(user, self.key_id)}
        answers = {*self.turn_ids, *(() if self.answer_id is None else (self.answer_id,))}
        return frozenset(found.union(map(answer_mark, answers)))

    @property
    def text(self) -> str | None:
        """The answer as plain text; None: it has calls, or no text."""
        if self.answer is None or self.answer.get("tool_calls"):
            return None
        content = self.answer.get("content")
        return content if isinstance(content, str) and content else None


def row_texts(row: Row) -> Iterator[ReadText]:
    """All that a model would read of a row, as the contamination of suites is looked for: any of its answers may be the
    one behind its messages."""
    asked = tuple(Turn(str(turn.get("role", "")), _spoken(turn.get("content"))) for turn in row.messages)
    given = "" if row.answer is None else _spoken(row.answer.get("content"))
    for answer in (given, row.better or "", row.worse or ""):
        yield ReadText.answered(asked, [answer])


def _spoken(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def row_of_file(example: Mapping[str, Any], file: str) -> Row:
    """Row of an example of a job's file.

    Raises:
        ValueError: it is none of kind sft, dpo or kto.
    """
    asked = example.get("prompt", example.get("messages"))
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not all(isinstance(turn, Mapping) for turn in asked) or not asked:
        raise ValueError("has neither prompt nor messages")
    turns, tools = [dict(turn) for turn in asked], example.get("tools")
    given = {name: example[name] for name in ("completion", "chosen", "rejected", "label") if name in example}
    shared: Json = {"source": "file", "session": f"file:{file}:{digest(turns)[:16]}", "tools": tools}
    if {"chosen", "rejected"} == given.keys():
        return Row(messages=turns, better=str(given["chosen"]), worse=str(given["rejected"]), rating=1.0, **shared)
    if "completion" in given and given.keys() <= {"completion", "label"}:
        answer = {"role": "assistant", "content": str(given["completion"])}
        rating = 1.0 if given.get("label", True) else -1.0
        return Row(messages=turns, answer=answer, rating=rating, **shared)
    if not given and turns[-1].get("role") == "assistant" and len(turns) > 1:
        return Row(messages=turns[:-1], answer=turns[-1], rating=1.0, **shared)
    raise ValueError("has no completion, no chosen and rejected, and no answer of the assistant at its end")
