"""Supervised fine-tuning: the request, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import not_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import JobBase, Pace, ServedLimits
from services.common.jobs.documents import Document, chat_documents, pair_document, placed, text_document
from services.common.jobs.examples import EVALUATES, ExampleJob
from services.common.jobs.fields.acceptance import Better, publish_if_rule
from services.common.jobs.fields.drafter import RefreshesDrafter
from services.common.jobs.fields.messages import SAYS, TEACHES, Message, check_asks, check_taught
from services.common.jobs.token_checks import check_conversation, check_segments, check_split, over_limit
from services.common.jobs.trajectories.documents import trajectory_documents
from services.common.jobs.trajectories.segments import Trajectory
from services.common.jobs.trajectories.stored import STORED, AnyTrajectory, StoredTrajectory
from services.common.validation.json_rules import (
    NULL,
    Rules,
    at_least_one,
    both,
    either,
    given,
    has,
    if_any,
    left_out,
)
from services.common.validation.strict_models import SentModel, absent

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

E = TypeVar("E", bound=SentModel)
_BEGINS_BY_ITSELF = has(
    trajectory=either(
        at_least_one(*STORED),
        has(segments={"type": "array", "prefixItems": [has(type="observation")]}),
    )
)


class SftExample(SentModel):
    """prompt + completion (loss on the completion), messages (loss on the assistant turns), text (on all of it), or a
    trajectory (on its actions)."""

    prompt: str | list[Message] | None = None
    completion: str | None = None
    messages: list[Message] | None = None
    text: str | None = Field(None, min_length=1)
    """Plain text, tokenized as it is; the token that ends a generation is put behind it."""
    tools: list[dict[str, Any]] | None = None
    """Function definitions, rendered by the chat template."""
    trajectory: AnyTrajectory | None = Field(None, exclude_if=absent)
    """It begins with an observation. Its rewards and log-probabilities are not read."""

    json_rules: ClassVar[Rules] = (
        either(
            both(given("prompt", "completion"), left_out("messages", "text", "trajectory")),
            both(given("messages"), left_out("prompt", "completion", "text", "trajectory")),
            both(given("text"), left_out("prompt", "completion", "messages", "tools", "trajectory")),
            both(_BEGINS_BY_ITSELF, left_out("prompt", "completion", "messages", "tools", "text")),
        ),
        if_any(prompt=SAYS, messages=either(NULL, TEACHES)),
    )

    @model_validator(mode="after")
    def _one_form(self) -> SftExample:
        forms = ("prompt", "completion", "messages", "text", "trajectory")
        given = {name for name in forms if getattr(self, name) is not None}
        if given not in ({"prompt", "completion"}, {"messages"}, {"text"}, {"trajectory"}):
            raise ValueError("give either prompt and completion, or messages, or text, or trajectory")
        if isinstance(self.trajectory, Trajectory) and not self.trajectory.begins_by_itself:
            raise ValueError("trajectory begins with an action: begin with an observation, which is its prompt")
        if self.trajectory is not None and self.tools is not None:
            raise ValueError("tools are part of the first observation already")
        check_asks(self.prompt, "prompt")
        if self.messages is not None:
            check_taught(self.messages, "messages")
        if self.text is not None and self.tools is not None:
            raise ValueError("tools are rendered by the chat template, which plain text does not go through")
        return self


class SftJob(RefreshesDrafter, ExampleJob[SftExample]):
    """Supervised fine-tuning."""

    evaluated: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_token_accuracy": "higher"}
    pace: ClassVar[Pace] = Pace(2e-4, epochs=3, least_steps=30)
    least_loss_fall: ClassVar[float] = 0.1
    loss_in_nats: ClassVar[bool] = True
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "examples": {
            "adapter": "sums",
            "attach": False,
            "examples": [
                {
                    "messages": [
                        {"role": "user", "content": "What is 12 plus 7?"},
                        {"role": "assistant", "content": "19"},
                    ]
                }
            ],
        }
    }
    json_rules: ClassVar[Rules] = (publish_if_rule(evaluated, EVALUATES),)

    kind: Literal["sft"] = "sft"
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Handling of an example over the token limit."""
    observation_weight: float = Field(0.0, ge=0, le=10, exclude_if=not_)
    """Of trajectories: weight in the loss of each token of observations behind the first action; the loss stays a mean
    over the tokens of actions. 0: nothing is learnt from what was seen."""

    @model_validator(mode="after")
    def _observes(self) -> SftJob:
        given = [example.trajectory is not None for _, example in self.numbered_examples()]
        if self.observation_weight and not any(given) and not self.unread:
            raise ValueError("observation_weight would do nothing here: only trajectories have observations")
        return self

    @property
    def stored(self) -> list[StoredTrajectory]:
        """Trajectories that the gateway replaces by their segments."""
        given = [example.trajectory for _, example in self.numbered_examples()]
        return [one for one in given if isinstance(one, StoredTrajectory)]

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. The documents are those that the trainer makes."""
        check_documents(served, self, self.overlong, read=lambda example: example)


def check_documents(
    served: ServedLimits,
    job: ExampleJob[E],
    overlong: Literal["error", "drop", "truncate"],
    *,
    read: Callable[[E], SftExample | None],
    asked: Callable[[ServedLimits, str, E], bool] = lambda *_: True,
) -> None:
    """Makes the documents of every example, as the trainer will. Raises as JobBase.check_tokens says.

    Args:
        read: the example as one of sft; None: it is a prompt without an answer.
        asked: checks such a prompt, and whether it is left.
    """
    limit = served.max_train_tokens

    def left(name: str, document: Document) -> bool:
        if not limit or document.length <= limit:
            return True
        if overlong == "error":
            raise over_limit(name, document.length, limit, "shorten it, or choose overlong 'drop' or 'truncate'")
        return overlong == "truncate" and any(document.trained[:limit])

    def fits(name: str, given: E) -> bool:
        example = read(given)
        if example is None:
            return asked(served, name, given)
        check_conversation(name, example.messages, example.tools, messages="messages")
        check_conversation(name, example.prompt, None, messages="prompt")
        if isinstance(example.trajectory, Trajectory):
            check_segments(served, f"{name}.trajectory", example.trajectory)
        field, _, index = name.removesuffix("]").partition("[")
        documents = example_documents(served.codec, job, example, int(index), field=field)
        kept = [left(name, document) for document in documents]
        return any(kept)

    check_split(served, job, fits)


def example_documents(
    codec: TextCodec, spec: JobBase, example: SftExample, source: int, *, field: str = "examples"
) -> list[Document]:
    """The documents of one example: one, or one an assistant turn where the template rewrites earlier turns.

    Raises:
        InvalidRequest: the example cannot be rendered as a generation; the message has its index.
    """
    with placed(f"{field}[{source}]"):
        if example.text is not None:
            return [text_document(codec, example.text, source)]
        if example.trajectory is not None:
            return _played(codec, spec, example.trajectory, source)
        if example.messages is not None:
            return chat_documents(codec, spec, example.messages, example.tools, source)
        if example.prompt is None or example.completion is None:
            raise InvalidRequest("give either prompt and completion, or messages")
        return [pair_document(codec, spec, example.prompt, example.completion, example.tools, source)]


def _played(codec: TextCodec, spec: JobBase, trajectory: Trajectory | StoredTrajectory, source: int) -> list[Document]:
    if isinstance(trajectory, StoredTrajectory):
        raise InvalidRequest("trajectories by ids must be submitted through the gateway, which fetches their tokens")
    weight = spec.observation_weight if isinstance(spec, SftJob) else 0.0
    parts = trajectory_documents(codec, trajectory, source, options=spec.chat_template_kwargs)
    return [part.document.learning_observations(weight) for part in parts]
