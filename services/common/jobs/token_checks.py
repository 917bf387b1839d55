"""Checks of a job's examples and prompts that need the tokenizer: counting tokens, naming the place of what is wrong.

A job is checked when it is submitted, so that a bad one never waits in the queue. The trainer counts again with its own
masks; here the tokens of each example are counted without the end token, so a job that is refused here would be refused
there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from services.common.errors import InvalidRequest
from services.common.jobs.base import JobBase, ServedLimits
from services.common.jobs.documents import placed, prompt_tokens
from services.common.jobs.examples import ExampleJob
from services.common.jobs.fields.messages import Message
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.trajectories.segments import Trajectory
from services.common.validation.strict_models import SentModel, check_finite

E = TypeVar("E", bound=SentModel)


@dataclass(frozen=True, slots=True)
class ExamplesLeft(Generic[E]):
    """The examples of a job that are within the limit."""

    trained: Sequence[E]
    held_out: Sequence[E]


def check_examples(
    served: ServedLimits,
    job: ExampleJob[E],
    tokens: Callable[[E], int],
    *,
    overlong: Literal["error", "drop"],
    advice: str,
) -> ExamplesLeft[E]:
    """Counts the tokens of every example and applies the job's policy for those over the limit.

    Args:
        tokens: counts those of the longest document of an example.
        advice: what to do about an example that is too long.
    """
    limit = served.max_train_tokens

    def fits(name: str, example: E) -> bool:
        with placed(name):
            count = tokens(example)
        if not limit or count <= limit:
            return True
        if overlong == "error":
            raise over_limit(name, count, limit, advice)
        return False

    return check_split(served, job, fits)


def check_split(served: ServedLimits, job: ExampleJob[E], fits: Callable[[str, E], bool]) -> ExamplesLeft[E]:
    """The examples of a job that are left; there are some to learn from, and to evaluate on where the job wants that.

    Args:
        fits: whether something of the example (after its place in the job) is left; may raise InvalidRequest.
    """
    left = {name for name, example in job.numbered_examples() if fits(name, example)}
    trained, held, field = job.split
    kept = ExamplesLeft(
        [example for index, example in trained if f"examples[{index}]" in left],
        [example for index, example in held if f"{field}[{index}]" in left],
    )
    limit = served.max_train_tokens
    if not kept.trained:
        every = "every one of the" if len(trained) == len(job.examples) else "every one that is left to train on of the"
        raise InvalidRequest(
            f"{every} examples is over the limit of {limit} tokens and dropped: shorten them", param="examples"
        )
    if held and not kept.held_out:
        raise InvalidRequest(
            f"every one of the {field} that is held out is over the limit of {limit} tokens and dropped: shorten them, "
            "or evaluate on others",
            param="eval_fraction" if field == "examples" else field,
        )
    return kept


def over_limit(field: str, tokens: int, limit: int, advice: str) -> InvalidRequest:
    """The refusal of an example that is too long to train on."""
    return InvalidRequest(f"{field} has {tokens} tokens and the limit for training is {limit}: {advice}", param=field)


def check_free(field: str, value: Any) -> None:
    """A part that the job's schema does not look into holds neither NaN nor infinity."""
    try:
        check_finite(value)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from error


def check_conversation(field: str, asked: str | Sequence[Message] | None, tools: Any, *, messages: str) -> None:
    """The free parts of a prompt, function definitions and tool calls, hold neither NaN nor infinity.

    Args:
        field: place of the example or group.
        messages: name of the field that holds the turns.
    """
    check_free(f"{field}.tools", tools)
    for message in () if asked is None or isinstance(asked, str) else asked:
        check_free(f"{field}.{messages}", message.tool_calls)


def asked_tokens(served: ServedLimits, job: JobBase, asked: PromptFields) -> list[int]:
    """Tokens of a prompt in any of its forms; none if it has none."""
    if asked.prompt_token_ids is not None:
        return asked.prompt_token_ids
    prompt = asked.messages if asked.messages is not None else asked.prompt
    return [] if prompt is None else prompt_tokens(served.codec, job, prompt, asked.tools)


def check_vocabulary(served: ServedLimits, field: str, token_ids: Sequence[int]) -> None:
    """Every token id is one of the model's."""
    if token_ids and (largest := max(token_ids)) >= served.vocab_size:
        raise InvalidRequest(
            f"{field} contains the token id {largest}, the vocabulary has {served.vocab_size} tokens", param=field
        )


def check_segments(served: ServedLimits, field: str, trajectory: Trajectory) -> None:
    """Token ids of a trajectory are the model's, and the free parts of its messages hold neither NaN nor infinity."""
    for index, segment in enumerate(trajectory.segments):
        place = f"{field}.segments[{index}]"
        check_vocabulary(served, f"{place}.token_ids", segment.token_ids or ())
        if segment.type == "observation":
            check_conversation(place, segment.messages, None, messages="messages")


def check_room(served: ServedLimits, name: str, tokens: int, max_tokens: int) -> None:
    """A completion of ``max_tokens`` fits behind a prompt of ``tokens``, in the engine and in training."""
    for limit, what in (
        (served.max_train_tokens, "the limit for training"),
        (served.max_model_len, "the context"),
    ):
        if limit and tokens + max_tokens > limit:
            raise InvalidRequest(
                f"{name} has {tokens} tokens, with max_tokens {max_tokens} over {what} of {limit}: "
                "shorten it, or lower max_tokens",
                param=name,
            )
