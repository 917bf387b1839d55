"""On-policy distillation (GKD, Agarwal et al., arXiv 2306.13649): the request, and its checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from services.common.adapters.composition import TEACHER_SCHEMA, Published, parse_composition, parse_published
from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest, TemperError
from services.common.jobs.base import DataRows, JobBase, Pace, ServedLimits
from services.common.jobs.documents import check_thinking, completion_tokens, placed
from services.common.jobs.fields.acceptance import Better, publish_if_rule
from services.common.jobs.fields.drafter import RefreshesDrafter
from services.common.jobs.fields.prompts import SampledPrompt, TokenIds, as_prompt
from services.common.jobs.token_checks import (
    asked_tokens,
    check_conversation,
    check_room,
    check_vocabulary,
    over_limit,
)
from services.common.validation.json_rules import (
    SOME,
    Rules,
    at_least_one,
    at_most_one,
    both,
    either,
    has,
    if_any,
    items,
    left_out,
    only_with,
    where,
)

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

CHECKPOINT = "checkpoint"
"""The teacher that the engine's settings name (TEMPER_TEACHER_MODEL)."""

EVALUATED: Mapping[str, Better] = {
    "eval_divergence": "lower",
    "eval_kl_student_teacher": "lower",
    "eval_teacher_agreement": "higher",
}

OpdLoss: TypeAlias = Literal["divergence", "sampled_reverse_kl"]


class DistillPrompt(SampledPrompt):
    """One prompt, as text, as a conversation or as token ids, and a completion of it from a dataset."""

    completion: str | None = None
    """Completion whose tokens, and the token that ends the turn, are learnt from."""
    completion_token_ids: TokenIds | None = Field(None, min_length=1)
    """Token ids as they are, with the token that ends the turn if that is to be learnt."""

    json_rules: ClassVar[Rules] = (at_most_one("completion", "completion_token_ids"),)

    @model_validator(mode="after")
    def _one_completion(self) -> DistillPrompt:
        if self.completion is not None and self.completion_token_ids is not None:
            raise ValueError("give completion or completion_token_ids, not both")
        return self

    @property
    def has_completion(self) -> bool:
        return self.completion is not None or self.completion_token_ids is not None


Prompt = Annotated[DistillPrompt, BeforeValidator(as_prompt, json_schema_input_type=str | DistillPrompt)]
_BARE = left_out("completion", "completion_token_ids")
_ANSWERED = at_least_one("completion", "completion_token_ids")


class OpdJob(RefreshesDrafter, JobBase):
    """On-policy distillation: the adapter learns to say what a teacher would have said, on the model's own completions.

    Each round the engine samples completions of `prompts_per_round` prompts by the policy as it is then, the teacher
    reads them, and the job's optimizer steps follow.
    """

    kind: Literal["opd"] = "opd"
    prompts: list[Prompt] = Field(min_length=1)
    teacher: str = Field(json_schema_extra=dict(TEACHER_SCHEMA))
    """"base" (the model without adapter), "name@n" (a version of an adapter), or "checkpoint" (the second model that
    the engine has loaded, TEMPER_TEACHER_MODEL)."""
    rounds: int = Field(ge=1, le=100_000)
    prompts_per_round: int | None = Field(None, ge=1)
    """None: all of them. They are taken in shuffled order, each once before one comes again."""
    prompts_per_step: int | None = Field(None, ge=1)
    """Completions an optimizer step; None: all of the round."""
    epochs: int = Field(1, ge=1, le=100)
    """Passes over each round's completions."""
    max_tokens: int = Field(ge=1)
    """Most tokens of each sampled completion. One that is cut off is learnt from as it is."""
    sampling_temperature: float = Field(1.0, ge=0, le=100)
    """0 is greedy."""
    stop_token_ids: TokenIds = Field(default_factory=list)
    """End a sampled completion, besides the model's own end tokens."""
    lmbda: float = Field(1.0, ge=0, le=1)
    """Probability that a completion is sampled; otherwise it is the prompt's own. Drawn for each prompt of a round."""
    loss: OpdLoss = "divergence"
    """Divergence of the whole distributions, or the reverse KL estimated from the sampled token alone."""
    beta: float = Field(1.0, ge=0, le=1)
    """Parameter of the generalized Jensen-Shannon divergence: 0 is KL(teacher ‖ student), 1 is KL(student ‖
    teacher)."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Both sides' logits are divided by it before they are compared."""
    eval_prompts: list[Prompt] = Field(default_factory=list)
    """Held out: the divergence on their completions, before the first round and every eval_every rounds. What has no
    completion gets a greedy one of the policy the job starts from, the same for all evaluations."""
    eval_every: int | None = Field(None, ge=1)
    """Rounds; None: after the last one only."""

    pace: ClassVar[Pace] = Pace(1e-4)
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "base": {
            "adapter": "sums",
            "attach": False,
            "teacher": "base",
            "prompts": [{"prompt": "What is 12 plus 7?"}],
            "rounds": 1,
            "max_tokens": 16,
        }
    }
    json_rules: ClassVar[Rules] = (
        only_with("eval_every", has(eval_prompts=SOME)),
        either(
            if_any(lmbda=1, prompts=items(_BARE)),
            both(has(lmbda={"exclusiveMaximum": 1}), if_any(prompts=items(_ANSWERED))),
        ),
        where(
            has(loss="sampled_reverse_kl"),
            if_any(lmbda=1, sampling_temperature={"exclusiveMinimum": 0}, temperature=1, beta=1),
        ),
        publish_if_rule(EVALUATED, has(eval_prompts=SOME)),
    )

    @model_validator(mode="before")
    @classmethod
    def _checkpoint_each_round(cls, data: Any) -> Any:
        # What a round sampled is not sampled alike again beside other traffic.
        return {"checkpoint_every": 1, **data} if isinstance(data, dict) else data

    @field_validator("teacher")
    @classmethod
    def _is_a_teacher(cls, value: str) -> str:
        if value in (BASE, CHECKPOINT):
            return value
        try:
            composition = parse_composition(value)
        except TemperError as error:
            raise ValueError(error.message) from error
        loose = next((member.name for member in composition.members if member.version is None), None)
        if loose is not None:
            raise ValueError(
                f'"{value}" is none of "base", "checkpoint" and "name@n": a teacher stays the same for the whole job, '
                f'so name the version ("{loose}@3")'
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> OpdJob:
        if self.prompts_per_round is not None and self.prompts_per_round > len(self.prompts):
            raise ValueError(
                f"prompts_per_round is {self.prompts_per_round}, but there are {len(self.prompts)} prompts"
            )
        if self.prompts_per_step is not None and self.prompts_per_step > self.round_prompts:
            raise ValueError(
                f"prompts_per_step is {self.prompts_per_step}, but a round has {self.round_prompts} prompts"
            )
        if self.eval_every is not None and not self.eval_prompts:
            raise ValueError("eval_every needs eval_prompts")
        without = next((index for index, prompt in enumerate(self.prompts) if not prompt.has_completion), None)
        if self.lmbda < 1 and without is not None:
            raise ValueError(
                f"lmbda is {self.lmbda:g}, so completions of the data are learnt from, and prompts[{without}] has "
                "none: give each prompt a completion or completion_token_ids, or set lmbda to 1"
            )
        with_one = next((index for index, prompt in enumerate(self.prompts) if prompt.has_completion), None)
        if self.lmbda == 1 and with_one is not None:
            raise ValueError(f"prompts[{with_one}] has a completion, which lmbda 1 never uses: lower lmbda")
        return self

    @model_validator(mode="after")
    def _said_to_no_purpose(self) -> OpdJob:
        # What a setting cannot do must not look done. By value: what the queue stores has every field.
        if self.loss != "sampled_reverse_kl":
            return self
        if self.lmbda < 1:
            raise ValueError("sampled_reverse_kl needs lmbda 1: how likely the data's completions were is not known")
        if self.sampling_temperature == 0:
            raise ValueError("sampled_reverse_kl estimates a mean over samples: set sampling_temperature above 0")
        if self.temperature != 1:
            raise ValueError(
                "temperature would do nothing here: sampled_reverse_kl compares the distributions that are sampled "
                "from, at sampling_temperature"
            )
        if self.beta != 1:
            raise ValueError('beta would do nothing here: sampled_reverse_kl is what loss "divergence" has with beta 1')
        return self

    @classmethod
    def data_rows(cls, rows: Sequence[Mapping[str, Any]]) -> DataRows:
        """See JobBase."""
        del rows
        return DataRows("prompts", DistillPrompt)

    def check_tokens(self, served: ServedLimits) -> None:
        """See JobBase. Every prompt leaves room for its completion."""
        if self.teacher == CHECKPOINT and not served.teacher:
            raise InvalidRequest(
                'teacher "checkpoint": the engines have no second model loaded; start them with TEMPER_TEACHER_MODEL '
                'set to the directory of a checkpoint with the same tokenizer, or choose "base" or a version "name@n"',
                param="teacher",
            )
        check_vocabulary(served, "stop_token_ids", self.stop_token_ids)
        for name, prompt in self.numbered_prompts():
            check_conversation(name, prompt.messages, prompt.tools, messages="messages")
            check_conversation(name, prompt.prompt, None, messages="prompt")
            check_vocabulary(served, f"{name}.prompt_token_ids", prompt.prompt_token_ids or ())
            check_vocabulary(served, f"{name}.completion_token_ids", prompt.completion_token_ids or ())
            with placed(name):
                tokens = asked_tokens(served, self, prompt)
                completion = data_completion(served.codec, self, prompt, tokens)
            if self.teacher == CHECKPOINT and served.teacher_vocab_size:
                check_read(name, [*tokens, *completion], served.teacher_vocab_size)
            check_room(served, name, len(tokens), self.max_tokens)
            limit, length = served.max_train_tokens, len(tokens) + len(completion)
            if limit and length > limit:
                raise over_limit(name, length, limit, "leave it out")

    @property
    def eval_metrics(self) -> Mapping[str, Better]:
        """See JobBase."""
        return EVALUATED if self.eval_prompts else {}

    @property
    def evaluation_way_out(self) -> str:
        """See JobBase."""
        return "give eval_prompts"

    def numbered_prompts(self) -> Iterator[tuple[str, DistillPrompt]]:
        """Every prompt with its place in the job, "prompts[3]"."""
        for field, prompts in (("prompts", self.prompts), ("eval_prompts", self.eval_prompts)):
            for index, prompt in enumerate(prompts):
                yield f"{field}[{index}]", prompt

    @property
    def round_prompts(self) -> int:
        """Prompts of one round."""
        return self.prompts_per_round or len(self.prompts)

    @property
    def step_prompts(self) -> int:
        """Completions of one optimizer step."""
        return self.prompts_per_step or self.round_prompts

    @property
    def teacher_version(self) -> Published | None:
        """The adapter version that teaches, or the composition of some, if one does."""
        if self.teacher in (BASE, CHECKPOINT):
            return None
        return parse_published(self.teacher)


def check_read(field: str, token_ids: Sequence[int], vocab: int) -> None:
    """A teacher with a vocabulary of ``vocab`` can read these tokens. Checkpoints with one tokenizer may be padded
    differently.

    Raises:
        InvalidRequest: it does not know one of them.
    """
    if token_ids and (largest := max(token_ids)) >= vocab:
        raise InvalidRequest(
            f"{field}: the token id {largest} is over the teacher's vocabulary of {vocab}", param=field
        )


def data_completion(codec: TextCodec, spec: OpdJob, asked: DistillPrompt, prompt: Sequence[int]) -> list[int]:
    """The completion that a prompt of a distillation job brings, with the token that ends it; none if it has none.

    Raises:
        InvalidRequest: it never leaves the thinking block that its prompt opens.
    """
    if asked.completion_token_ids is not None:
        return asked.completion_token_ids
    if asked.completion is None:
        return []
    tokens = completion_tokens(codec, asked.completion, ends=True)
    if spec.prompt_format == "chat" and asked.prompt_token_ids is None:
        check_thinking(codec, prompt, tokens)
    return tokens
