"""Training of a drafter on the model's own distributions: the request, and its checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from services.common.adapters.composition import Published, parse_policy
from services.common.adapters.drafter_form import (
    MOST_BLOCK,
    MOST_CHAINED,
    MOST_LAYERS,
    MTP_FORM,
    DrafterForm,
    DrafterKind,
)
from services.common.adapters.manifest import Kind
from services.common.adapters.names import BASE, AdapterVersion
from services.common.errors import InvalidRequest
from services.common.jobs.base import Pace, Recompute, ServedLimits
from services.common.jobs.documents import placed, prompt_tokens
from services.common.jobs.examples import EVALUATES, ExampleJob
from services.common.jobs.fields.acceptance import Better, PublishIf, publish_if_rule
from services.common.jobs.fields.drafter import DraftExample
from services.common.jobs.fields.gates import AttachIf
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.fields.refs import FixedPolicy
from services.common.jobs.kinds.grpo import GrpoJob
from services.common.jobs.kinds.opd import OpdJob
from services.common.jobs.kinds.sft import SftExample, SftJob, check_documents
from services.common.jobs.token_checks import check_conversation, check_room, check_vocabulary
from services.common.jobs.trajectories.segments import Trajectory
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, has, if_any, left_out, only_with

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

_USUAL_TOKENS = 256
_MOST_EXAMPLES = 1000
"""Most texts of a job that its drafter is refreshed on."""
_SPLITS = 10
"""Texts of which a tenth is held out."""
_OF_ADAPTERS = ("lora", "recompute", "gradient_checkpointing", "attach_if", "epoch_versions")
_USUAL_BLOCK = 8
"""Tokens that a new block drafter proposes at once."""


def _asks_for_suites(condition: PublishIf | None) -> bool:
    return condition is not None and condition.asks


class DraftJob(ExampleJob[DraftExample]):
    """Training of a drafter: weights of the mtp layer, or a block drafter in its place, which proposes tokens that the
    model then verifies. It learns to say what the model says behind these texts, an adapter's words included if
    `target` names one. The texts themselves are not learnt; a prompt without an answer is answered by the target
    first."""

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
        only_with("block", has(form="block")),
        only_with("layers", has(form="block")),
        only_with("depth", if_any(form={"not": {"const": "block"}})),
    )

    kind: Literal["draft"] = "draft"
    target: FixedPolicy = BASE
    """Policy whose tokens are to be proposed: "base", a version of an adapter, "polite@3", or several together,
    "a@3*0.7+b@1"."""
    form: DrafterKind | None = None
    """mtp: the mtp layer, which proposes tokens one after the other, fed its own output. block: layers as that one
    which propose several tokens in one pass. Left out: that of the drafter that it goes on from; a new one is mtp."""
    depth: int | None = Field(None, ge=1, le=MOST_CHAINED)
    """Tokens that are proposed in a row, 4 if left out. Each further one is learnt behind what the layer itself made of
    the one before. Not of a block drafter, which learns its block."""
    block: int | None = Field(None, ge=1, le=MOST_BLOCK)
    """With form=block, tokens that it proposes at once. Left out: those of the drafter that it goes on from, or 8."""
    layers: int | None = Field(None, ge=1, le=MOST_LAYERS)
    """With form=block, its layers. Left out: those of the drafter that it goes on from, or 1."""
    max_tokens: int = Field(256, ge=1)
    """Most tokens of the answer that the target gives to an example without one."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature of these answers; 0 is greedy."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Handling of an example over the token limit."""
    attach: Literal[False] = False
    """A drafter answers nothing, so it is not attached."""
    # Fields of jobs that train adapters.
    lora: SkipJsonSchema[LoraSettings] = LoraSettings()
    recompute: SkipJsonSchema[Recompute | None] = None
    gradient_checkpointing: SkipJsonSchema[bool] = False
    epoch_versions: SkipJsonSchema[int | None] = Field(None, exclude_if=lambda value: value is None)
    attach_if: SkipJsonSchema[AttachIf | None] = Field(None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _of_a_drafter(self) -> DraftJob:
        for name in _OF_ADAPTERS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise contradiction(f"{name} is of jobs that train adapters: leave it out", name)
        for name in ("block", "layers"):
            if getattr(self, name) is not None and self.form != "block":
                raise contradiction(f"{name} is of block drafters: set form to block, or leave it out", name)
        if self.depth is not None and self.form == "block":
            raise contradiction("depth is of the mtp layer, and a block drafter learns its block: set block", "depth")
        if _asks_for_suites(self.publish_if):
            raise contradiction("suites are answered by adapters: name eval_loss or eval_acceptance", "publish_if")
        return self

    def form_from(self, before: DrafterForm | None) -> DrafterForm:
        """Form of the drafter that it makes.

        Args:
            before: of the one that it goes on from; None: of none.

        Raises:
            InvalidRequest: that one cannot become it.
        """
        known = before or MTP_FORM
        if self.form is None:
            made = known
        elif self.form == "mtp":
            made = MTP_FORM
        else:
            made = DrafterForm(self.block or known.block or _USUAL_BLOCK, self.layers or known.layers)
        if known.block and made != known:
            raise InvalidRequest(
                f"what the job goes on from is {known}, and it is to make {made}: leave out form, block and layers, or "
                "set start_from to base",
                param="form",
            )
        if made.block and self.depth is not None:
            raise InvalidRequest(f"depth is of the mtp layer, and the job makes {made}: leave it out", param="depth")
        return made

    @property
    def target_version(self) -> Published | None:
        """Version of an adapter, or composition, whose tokens are to be proposed; None: the base model's are."""
        return parse_policy(self.target)

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. The documents are those that the trainer makes."""
        check_documents(served, self, self.overlong, read=as_sft, asked=self._check_prompt)

    def _check_prompt(self, served: ServedLimits, name: str, example: DraftExample) -> bool:
        """Whether an answer fits behind the prompt of an example. Raises InvalidRequest."""
        check_conversation(name, example.messages, example.tools, messages="messages")
        check_vocabulary(served, name, example.prompt_token_ids or ())
        with placed(name):
            tokens = asked_ids(served.codec, self, example)
        if (
            self.overlong == "drop"
            and served.max_train_tokens
            and len(tokens) + self.max_tokens > served.max_train_tokens
        ):
            return False
        check_room(served, name, len(tokens), self.max_tokens)
        return True


def as_sft(example: DraftExample) -> SftExample | None:
    """The example as one of sft; None: the target has to answer it first."""
    if not example.answered:
        return None
    return SftExample.model_construct(
        prompt=example.prompt,
        completion=example.completion,
        messages=example.messages,
        text=example.text,
        tools=example.tools,
    )


def asked_ids(codec: TextCodec, spec: DraftJob, example: DraftExample) -> list[int]:
    """Tokens of the prompt of an example that the target answers first. Raises InvalidRequest."""
    if example.prompt_token_ids is not None:
        return example.prompt_token_ids
    return prompt_tokens(codec, spec, example.messages or example.prompt or "", example.tools)


def refresh(
    spec: SftJob | GrpoJob | OpdJob, version: AdapterVersion, drafter: str, *, metadata: Mapping[str, str]
) -> DraftJob:
    """The draft job that follows on a job: of an sft job's examples, of the prompts of the others.

    Args:
        version: that came of the job.
        drafter: name of the drafter.
    """
    most_tokens = _USUAL_TOKENS
    if isinstance(spec, SftJob):
        # Of a trajectory the drafter's target answers the opening.
        found = [
            example.trajectory.opening
            if isinstance(example.trajectory, Trajectory)
            else example.model_dump(mode="json", exclude_none=True)
            for example in spec.examples
        ]
    elif isinstance(spec, GrpoJob) and spec.generate is None:
        found = [opening for group in spec.scored_groups for opening in group.openings]
    else:
        settings = spec if isinstance(spec, OpdJob) else spec.generate
        if settings is None:
            raise ValueError("the job samples nothing")
        prompts: Sequence[PromptFields] = settings.prompts
        most_tokens = min(most_tokens, settings.max_tokens)
        fields = {"prompt", "messages", "prompt_token_ids", "tools"}
        found = [prompt.model_dump(mode="json", include=fields, exclude_none=True) for prompt in prompts]
    texts = list({json.dumps(one, sort_keys=True): one for one in found}.values())
    step = -(-len(texts) // _MOST_EXAMPLES)
    body = {
        "adapter": drafter,
        "target": str(version),
        "examples": texts[::step],
        "max_tokens": most_tokens,
        "overlong": "drop",
        "prompt_format": spec.prompt_format,
        "chat_template_kwargs": spec.chat_template_kwargs,
        "max_tokens_per_microbatch": spec.max_tokens_per_microbatch,
        "seed": spec.seed,
        "metadata": dict(metadata),
    }
    return DraftJob.model_validate(body | ({"eval_fraction": 0.1} if len(texts) >= _SPLITS else {}))
