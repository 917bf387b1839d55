"""Sample that a scorer judges, one completion with its prompt as text, and reference that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the command line checks jobs without a tokenizer, and starts faster without its libraries
    from services.common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool: by the model, or as it should be."""

    name: str
    arguments: Any
    """Parsed JSON; a text that is no JSON as it is."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction that an answer follows or not, as a program can tell."""

    id: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Tests of a program."""

    code: str
    """Python behind the program, which raises where the program is wrong."""
    prelude: str = ""
    """Python in front of the program."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference of a suite's item: what is right. Each scorer reads the part that it compares with."""

    expected: tuple[str, ...] = ()
    """Answers of which each is right."""
    choices: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    """Calls that are right; empty: none should be made. None: not said."""
    instructions: tuple[Instruction, ...] = ()
    tests: ProgramTests | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with its prompt, as text."""

    prompt: str
    """Prompt as the model read it, chat template included."""
    completion: str
    """Completion without special tokens."""
    tokens: int
    """Tokens of the completion, with the one that ended it."""
    truncated: bool = False
    question: str = ""
    """Text of the prompt's last turn."""
    answer: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    said: str | None = None
    """The completion without its thinking block, where that is something else."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the completion makes, in their order; of suites only."""
    reference: Reference = Reference()
    """Reference of the sample's item; of suites only."""

    @property
    def text(self) -> str:
        """Text to judge: what a user would read as the answer."""
        return self.completion if self.said is None else self.said


class Scorer(Protocol):
    """One scorer of a job."""

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> Sequence[float]:
        """One finite number a sample. Raises Unavailable, and what ``interrupt`` raises."""
        ...


def without_thinking(codec: TextCodec, prompt: Sequence[int], completion: Sequence[int]) -> str | None:
    """The text behind the completion's thinking block; None if there is no such block. It is empty if the completion
    never left the block that it or its prompt opened: judged by its thoughts, a model could try every answer there."""
    opened, closed = codec.token_id("<think>"), codec.token_id("</think>")
    if opened is None or closed is None:
        return None
    if closed in completion:
        last = len(completion) - 1 - list(reversed(completion)).index(closed)
        return codec.decode(completion[last + 1 :])
    before = next((token for token in reversed(prompt) if token in (opened, closed)), closed)
    return "" if opened in completion or before == opened else None


def as_utf8(text: str) -> str:
    """The text without lone surrogates, which UTF-8, and so RE2, does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")


def error_text(error: Exception) -> str:
    """First line of what a library says about a pattern or schema."""
    found = error.args[0] if error.args else error
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(error)
    return text.splitlines()[0][:300] if text else type(error).__name__
