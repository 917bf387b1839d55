"""Lines of uploaded files in OpenAI's formats, as examples and prompts of training jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs import DpoExample, Message, SftExample
from services.common.jobs.kinds.generate import RolloutPrompt
from services.common.validation.errors import problem
from services.common.validation.json_text import parsed_json
from services.common.validation.strict_models import SentModel
from services.gateway.api.batches.input_file import LineSplitter, LineTooLong
from services.gateway.core.file_store import FileInfo, FileStore

Row = TypeVar("Row")
Tools = list[dict[str, Any]]
Conversation = Annotated[list[Message], Field(min_length=1)]


class SupervisedLine(SentModel):
    """A conversation whose assistant's turns are learnt; or a prompt and its completion, as text without template."""

    messages: Conversation | None = None
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    """Accepted without effect: the turns show it."""
    prompt: str | None = None
    completion: str | None = None

    def example(self) -> dict[str, Any]:
        """Fields of an SftExample."""
        return {name: getattr(self, name) for name in ("messages", "tools", "prompt", "completion")}


class PreferenceInput(SentModel):
    """The conversation that both outputs answer."""

    messages: Conversation
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    """Accepted without effect."""


class PreferenceLine(SentModel):
    """Two outputs, of which one is preferred."""

    input: PreferenceInput
    preferred_output: list[Message] = Field(min_length=1, max_length=1)
    non_preferred_output: list[Message] = Field(min_length=1, max_length=1)

    @model_validator(mode="after")
    def _texts(self) -> PreferenceLine:
        for field in ("preferred_output", "non_preferred_output"):
            message = getattr(self, field)[0]
            if message.role != "assistant" or message.tool_calls or message.thoughts is not None:
                raise ValueError(f"{field} must be one turn of the assistant with nothing but content")
        return self

    def example(self) -> dict[str, Any]:
        """Fields of a DpoExample."""
        return {
            "messages": self.input.messages,
            "tools": self.input.tools,
            "chosen": self.preferred_output[0].turn["content"],
            "rejected": self.non_preferred_output[0].turn["content"],
        }


class Lines:
    """Rows of one file, and the numbers of their lines.

    Args:
        field: of the request, which names the file in messages.
    """

    def __init__(self, field: str, files: FileStore, owner: str, info: FileInfo) -> None:
        self.field = field
        self.numbers: list[int] = []
        self._files, self._owner, self._info = files, owner, info

    def read(self, convert: Callable[[Mapping[str, Any]], Row]) -> list[Row]:
        """All rows. Blocking.

        Args:
            convert: makes a row of a line; may raise InvalidRequest.

        Raises:
            InvalidRequest: a line is none; with its number and field. NotFound: the file was deleted meanwhile.
        """
        rows = []
        for number, text in self._texts():
            try:
                value = parsed_json(text, allow_inf_nan=True)
                if not isinstance(value, dict):
                    raise self.refused(number, "the line must be a JSON object")
                rows.append(convert(value))
            except InvalidRequest as error:
                if error.param == self.field:
                    raise
                raise self.refused(number, error.message) from error
            except ValueError as error:
                raise self.refused(number, f"the line is not valid JSON: {str(error)[:200]}") from error
            self.numbers.append(number)
        if not rows:
            raise InvalidRequest(f"{self.field}: {self._info.id} has no lines", param=self.field)
        return rows

    def refused(self, number: int, reason: str) -> InvalidRequest:
        """Error of one line."""
        return InvalidRequest(f"{self.field}: line {number}: {reason}", param=self.field)

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        splitter = LineSplitter(self._info.bytes)
        for piece in range(self._info.pieces):
            content = self._files.piece(self._owner, self._info, piece)
            try:
                yield from splitter.feed(content, last=piece == self._info.pieces - 1)
            except LineTooLong as error:
                raise self.refused(error.error.line or 0, error.error.message) from error


def supervised(row: Mapping[str, Any]) -> SftExample:
    """Example of a line of supervised fine-tuning."""
    return _read(SftExample, _read(SupervisedLine, row).example())


def preference(row: Mapping[str, Any]) -> DpoExample:
    """Pair of a line of preferences."""
    return _read(DpoExample, _read(PreferenceLine, row).example())


def prompt(row: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], str]) -> RolloutPrompt:
    """Prompt of a line of reinforcement fine-tuning, which has more fields for its grader."""
    if not row.get("messages"):
        raise InvalidRequest("the field 'messages' is missing: the conversation that is to be answered")
    asked = {name: row[name] for name in ("messages", "tools") if name in row}
    return _read(RolloutPrompt, {**asked, "answer": answer(row)})


Model = TypeVar("Model", bound=BaseModel)


def _read(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Raises InvalidRequest with the field at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest(problem(error, model, fields)) from error
