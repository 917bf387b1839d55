"""Training of a drafter on the model's own distributions: the request, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from services.common.adapters.manifest import Kind
from services.common.adapters.names import BASE, SAMPLER_SCHEMA, AdapterVersion, parse_adapter_version
from services.common.errors import InvalidRequest
from services.common.jobs.base import Pace, Recompute, ServedLimits
from services.common.jobs.examples import EVALUATES, ExampleJob
from services.common.jobs.fields.acceptance import Better, PublishIf, publish_if_rule
from services.common.jobs.fields.gates import AttachIf, contradiction
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.kinds.sft import SftExample, check_documents
from services.common.validation.json_rules import Rules, has, left_out, only_with

_OF_ADAPTERS = ("lora", "recompute", "gradient_checkpointing", "attach_if")
MOST_DEPTH = 4


def _asks_for_suites(condition: PublishIf | None) -> bool:
    return condition is not None and condition.asks


class DraftJob(ExampleJob[SftExample]):
    """Training of a drafter: weights of the mtp layer, which proposes tokens that the model then verifies. It learns to
    say what the model says behind these texts, an adapter's words included if `target` names one. The texts themselves
    are not learnt."""

    evaluated: ClassVar[Mapping[str, Better]] = {"eval_loss": "lower", "eval_acceptance": "higher"}
    pace: ClassVar[Pace] = Pace(1e-4, epochs=3, least_steps=30)
    least_loss_fall: ClassVar[float] = 0.02
    makes: ClassVar[Kind] = "drafter"
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "examples": {
            "adapter": "sharp",
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
    json_rules: ClassVar[Rules] = (
        publish_if_rule(evaluated, EVALUATES),
        only_with("publish_if", has(publish_if=left_out("gain", "no_loss"))),
    )

    kind: Literal["draft"] = "draft"
    target: str = Field(BASE, json_schema_extra=dict(SAMPLER_SCHEMA))
    """Policy whose tokens are to be proposed: "base", or a version of an adapter, "polite@3"."""
    depth: int = Field(1, ge=1, le=MOST_DEPTH)
    """Tokens that are proposed in a row. Each further one is learnt behind what the layer itself made of the one
    before."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Handling of an example over the token limit."""
    attach: Literal[False] = False
    """A drafter answers nothing, so it is not attached."""
    # Fields of jobs that train adapters.
    lora: SkipJsonSchema[LoraSettings] = LoraSettings()
    recompute: SkipJsonSchema[Recompute | None] = None
    gradient_checkpointing: SkipJsonSchema[bool] = False
    attach_if: SkipJsonSchema[AttachIf | None] = Field(None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _of_a_drafter(self) -> DraftJob:
        for name in _OF_ADAPTERS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise contradiction(f"{name} is of jobs that train adapters: leave it out", name)
        if _asks_for_suites(self.publish_if):
            raise contradiction("suites are answered by adapters: name eval_loss or eval_acceptance", "publish_if")
        return self

    @model_validator(mode="after")
    def _names_a_version(self) -> DraftJob:
        try:
            _ = self.target_version
        except InvalidRequest as error:
            raise contradiction(error.message, "target") from error
        return self

    @property
    def target_version(self) -> AdapterVersion | None:
        """Version of an adapter whose tokens are to be proposed; None: the base model's are."""
        return None if self.target == BASE else parse_adapter_version(self.target)

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. The documents are those that the trainer makes."""
        check_documents(served, self, self.overlong)
