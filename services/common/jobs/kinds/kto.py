"""Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306): the request, and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.base import Pace, ServedLimits
from services.common.jobs.documents import answer_documents
from services.common.jobs.examples import EVALUATES, OF_DATASET, ExampleJob
from services.common.jobs.fields.acceptance import Better, publish_if_rule
from services.common.jobs.fields.prompts import AskedExample
from services.common.jobs.token_checks import check_conversation, check_examples
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, both, contains, either, has, if_any

LEAST_COMPARED = 2
"""Examples that a reference point is estimated from, at least: one completion has no other's prompt."""


def check_labels(labels: Sequence[bool]) -> None:
    """Checks that the examples left to train on have both labels.

    Raises:
        InvalidRequest: all are equal.
    """
    if len(set(labels)) < 2:
        raise InvalidRequest(
            f"the {len(labels)} examples that are left to train on all have label {str(labels[0]).lower()}: KTO needs "
            "both; hold out less (eval_fraction), choose another seed, or shorten what is dropped",
            param="examples",
        )


def check_held_out(count: int, field: str) -> None:
    """Checks that the examples left to evaluate on can be compared with each other.

    Raises:
        InvalidRequest: there are too few.
    """
    if count < LEAST_COMPARED:
        raise InvalidRequest(
            f"{count} example is held out: KTO evaluates at least {LEAST_COMPARED}, which it compares with each other; "
            "hold more out, or none",
            param=field,
        )


class KtoExample(AskedExample):
    """One completion and whether it is good."""

    completion: str
    label: bool
    """true: thumbs up, false: thumbs down."""


class KtoJob(ExampleJob[KtoExample]):
    """Kahneman-Tversky optimisation: preference learning from thumbs up and thumbs down."""

    evaluated: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_margin": "higher"}
    pace: ClassVar[Pace] = Pace(2e-5, least_steps=20)
    least_loss_fall: ClassVar[float] = 0.02
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "thumbs": {
            "adapter": "sums",
            "attach": False,
            "examples": [
                {"prompt": "What is 12 plus 7?", "completion": "19", "label": True},
                {"prompt": "What is 12 plus 7?", "completion": "20", "label": False},
            ],
        }
    }
    json_rules: ClassVar[Rules] = (
        either(OF_DATASET, has(examples=both(contains(has(label=True)), contains(has(label=False))))),
        if_any(eval_examples=either({"maxItems": 0}, {"minItems": 2})),
        publish_if_rule(evaluated, EVALUATES),
    )

    kind: Literal["kto"] = "kto"
    batch_size: int = Field(8, ge=2)
    """Examples an optimizer step. The reference point is estimated from them, so more than a few."""
    overlong: Literal["error", "drop"] = "error"
    """Handling of an example over the token limit."""
    beta: float = Field(0.1, gt=0, le=100)
    """Strength with which the policy is held to the model without adapter."""
    desirable_weight: float = Field(1.0, gt=0, le=1e3)
    undesirable_weight: float = Field(1.0, gt=0, le=1e3)
    """The paper keeps (desirable_weight · number of true) : (undesirable_weight · number of false) between 1:1 and
    4:3."""

    @model_validator(mode="after")
    def _both_labels(self) -> KtoJob:
        if self.unread:
            return self
        labels = {example.label for example in self.examples}
        if labels == {True}:
            raise ValueError(
                "every label is true: KTO needs examples of both labels; good examples alone are what sft learns from"
            )
        if labels == {False}:
            raise ValueError(
                "every label is false: KTO needs examples of both labels, since bad ones alone say nothing of what the "
                "answer should be"
            )
        if len(self.eval_examples) == 1:
            raise ValueError(
                "eval_examples needs at least 2 examples: the reference point compares them with each other"
            )
        if self.held_out == 1:
            raise contradiction(
                "eval_fraction holds one example out, and evaluations need at least 2: the reference point compares "
                "them with each other; hold more out, or give eval_examples",
                "eval_fraction",
            )
        if len(self.examples) - self.held_out < 2:
            raise contradiction(
                "eval_fraction leaves one example to train on, and KTO needs both labels: hold less out",
                "eval_fraction",
            )
        return self

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase."""
        for name, example in self.numbered_examples():
            messages = "messages" if example.prompt is None else "prompt"
            check_conversation(name, example.asked, example.tools, messages=messages)

        def tokens(example: KtoExample) -> int:
            return answer_documents(served.codec, self, example, (example.completion,), 0)[0].length

        left = check_examples(
            served, self, tokens, overlong=self.overlong, advice="shorten it, or choose overlong 'drop'"
        )
        check_labels([example.label for example in left.trained])
        if self.held_out or self.eval_examples:
            check_held_out(len(left.held_out), "eval_examples" if self.eval_examples else "eval_fraction")
