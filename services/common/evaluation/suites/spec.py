"""Suites as data: what an item asks and what is right, and how its answers are sampled and scored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.common.jobs.fields.messages import SAYS, Message, check_asks
from services.common.jobs.fields.prompts import AskedExample
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.judge import JudgeSpec
from services.common.jobs.scorers.of_suites.instructions import InstructionsSpec
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec
from services.common.jobs.scorers.of_suites.tool_calls import ToolCallsSpec
from services.common.jobs.scorers.python_tests import PythonTestsReward
from services.common.jobs.scorers.registry import SuiteScorerSpec
from services.common.jobs.scorers.sample import Instruction, ProgramTests, Reference, ToolCall
from services.common.jobs.scorers.webhook import WebhookReward
from services.common.validation.json_rules import NULL, Rule, Rules, either, has, if_any, never, only_with, where
from services.common.validation.strict_models import SentModel

MAX_ITEMS = 100_000
MAX_SAMPLES = 256
MAX_SHOTS = 64
_ALONE: Rule = if_any(samples=1)


def _as_texts(value: Any) -> Any:
    # JSON writes many answers as numbers; True is none.
    values = value if isinstance(value, list) else [value]
    return [str(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in values]


def _nothing(value: object) -> bool:
    return value == []


Texts = Annotated[
    list[str],
    BeforeValidator(_as_texts, json_schema_input_type=str | float | Annotated[list[str | float], Field(min_length=1)]),
    Field(min_length=1),
]


class ExpectedToolCall(SentModel):
    """Call of a tool as it should be."""

    name: str = Field(min_length=1, max_length=200)
    arguments: dict[str, Any] = Field(default_factory=dict)


class ExpectedInstruction(SentModel):
    """Instruction that an answer has to follow, by IFEval's name and arguments."""

    id: str = Field(min_length=1, max_length=200)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ItemTests(SentModel):
    """Tests of the program of an answer."""

    code: str = Field(min_length=1, max_length=1_000_000)
    """Python behind the program, which raises where the program is wrong."""
    prelude: str = Field("", max_length=1_000_000)
    """Python in front of the program."""


class SuiteItem(AskedExample):
    """One item: a prompt or a conversation, and what its answer is compared with."""

    id: str = Field("", max_length=200)
    """Name of the item in results, one of its own in its suite; left out, it is the number of its line."""
    expected: Texts | None = None
    """The right answer, or several of which each is right."""
    choices: list[str] | None = Field(None, min_length=2, max_length=100)
    """Answers to choose from; `expected` is the text or the letter of the right one."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema of a right answer."""
    expected_tool_calls: list[ExpectedToolCall] | None = Field(None, max_length=100)
    """Calls of tools that are right; an empty list: none is."""
    instructions: list[ExpectedInstruction] | None = Field(None, min_length=1, max_length=100)
    """Instructions that a program can verify."""
    tests: ItemTests | None = None
    """Tests of a right answer's program."""
    group: str | None = Field(None, min_length=1, max_length=200)
    """Items of one group say much the same (questions on one text, variants of one problem): statistics draw them
    together, and a split of a training file keeps them together."""
    weight: float = Field(1.0, gt=0, le=1e6)
    metadata: dict[str, str] = Field(default_factory=dict)
    """Handed to webhooks as it is."""
    marks: list[str] = Field(default_factory=list, max_length=1000, exclude_if=_nothing)
    """Digests by which an item of a data set is found when a user or a request is erased."""

    @property
    def reference(self) -> Reference:
        """What is right, as scorers read it."""
        calls = self.expected_tool_calls
        return Reference(
            expected=tuple(self.expected or ()),
            choices=tuple(self.choices or ()),
            json_schema=self.json_schema,
            tool_calls=None if calls is None else tuple(ToolCall(call.name, call.arguments) for call in calls),
            instructions=tuple(Instruction(one.id, one.kwargs) for one in self.instructions or ()),
            tests=None if self.tests is None else ProgramTests(self.tests.code, self.tests.prelude),
        )


class Shot(SentModel):
    """An answered example that stands before each item."""

    prompt: str | list[Message]
    completion: str

    json_rules: ClassVar[Rules] = (has(prompt=SAYS),)

    @model_validator(mode="after")
    def _asks(self) -> Shot:
        check_asks(self.prompt, "prompt")
        return self


class SuiteSampling(SentModel):
    """Sampling of the answers."""

    max_tokens: int = Field(256, ge=1, lt=2**31)
    temperature: float = Field(0.0, ge=0, le=100)
    """0: the most likely token, always."""
    top_p: float = Field(1.0, gt=0, le=1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=16)
    samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Answers of each item."""
    score: Literal["mean", "pass", "majority"] = "mean"
    """Score of an item with several samples: their mean, the probability that one of k scores 1 (pass@k), or the one
    that the most frequent answer among k does (majority@k)."""
    k: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    """Number of samples in pass@k and majority@k; None: all of them."""

    json_rules: ClassVar[Rules] = (
        either(_ALONE, has(temperature={"exclusiveMinimum": 0})),
        only_with("k", has(score={"enum": ["pass", "majority"]})),
        where(has(score={"enum": ["pass", "majority"]}), has(samples={"minimum": 2})),
    )

    @model_validator(mode="after")
    def _consistent(self) -> SuiteSampling:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} and temperature 0: all would be the same, give a temperature")
        if self.score == "mean" and self.k is not None:
            raise ValueError('k would do nothing here: only score "pass" and "majority" read it')
        if self.score != "mean" and self.samples == 1:
            raise ValueError(f'score "{self.score}" needs several samples: set samples')
        if self.k is not None and self.k > self.samples:
            raise ValueError(f"k is {self.k}, but there are {self.samples} samples of an item")
        return self


class SuiteSettings(SentModel):
    """Everything that a suite says of all of its items."""

    scorer: SuiteScorerSpec
    """Scorer of an answer: one of the rewards of training jobs, with weight 1, or one that reads more than a text."""
    few_shot: list[Shot] = Field(default_factory=list, max_length=MAX_SHOTS)
    sampling: SuiteSampling = SuiteSampling()
    prompt_format: Literal["chat", "raw"] = "chat"
    """Reading of a plain-string prompt: as one user message, or as text that is used as it is."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. {"enable_thinking": true}."""
    description: str = Field("", max_length=2000)
    metadata: dict[str, str] = Field(default_factory=dict)

    json_rules: ClassVar[Rules] = (
        if_any(scorer=if_any(weight=1)),
        where(
            has(scorer=has(type={"enum": ["choice", "perplexity"]})),
            if_any(sampling=if_any(**{**SuiteSampling().model_dump(), "stop": {"maxItems": 0}, "k": NULL})),
        ),
        where(
            has(scorer=has(type={"enum": ["webhook", "tool_calls", "instructions", "judge", "python_tests"]})),
            if_any(sampling=never(has(score="majority"))),
        ),
    )

    @model_validator(mode="after")
    def _one_weight(self) -> SuiteSettings:
        if isinstance(self.scorer, ScorerSpec) and self.scorer.weight != 1:
            raise ValueError("scorer.weight must be 1: a suite has one scorer, and weights belong to items")
        return self

    @model_validator(mode="after")
    def _samples_are_scored(self) -> SuiteSettings:
        if isinstance(self.scorer, ChoiceSpec | PerplexitySpec) and self.sampling != SuiteSampling():
            raise ValueError(f"sampling would do nothing here: the {self.scorer.name} scorer samples no answers")
        if (
            isinstance(self.scorer, WebhookReward | ToolCallsSpec | InstructionsSpec | JudgeSpec | PythonTestsReward)
            and self.sampling.score == "majority"
        ):
            raise ValueError(
                f'sampling.score: "majority" needs to know equal answers, which {self.scorer.name} does not'
            )
        return self
