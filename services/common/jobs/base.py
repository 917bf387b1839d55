"""Base of all training jobs: fields of the adapter, its shape, the optimizer and the reading of the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.adapters.manifest import Kind
from services.common.adapters.names import POLICY_SCHEMA, AdapterName
from services.common.jobs.fields.acceptance import Better, PublishIf, check_publish_if
from services.common.jobs.fields.gates import AttachIf, SuiteGate
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.scorers.base import ScorerSettings
from services.common.jobs.scorers.webhook import WebhookUrl
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, both, given, has, if_any, never, only_with, true_only_with
from services.common.validation.strict_models import SentModel, absent

if TYPE_CHECKING:
    from services.common.text.tokenizer import TextCodec

Recompute = Literal["none", "selective", "full"]
_WIDTH = 2560
"""Hidden size of the model that the rates are for (4B)."""
_WIDEST, _NARROWEST = 2 * _WIDTH, _WIDTH // 10
"""Hidden sizes between which a rate follows the width."""
_MOST_SEEN = 25_000
"""Examples that a job goes through, all epochs together, unless a single epoch has more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Defaults of a kind of job: how fast it learns, and how often it goes through its examples.

    docs/guides/training.md tells users the same, and docs/decisions/training-defaults.md why.
    """

    learning_rate: float
    """AdamW's rate for adapters on a model with a hidden size of 2560 (4B)."""
    epochs: int = 1
    least_steps: int = 1
    """Optimizer steps below which a job makes further epochs: one step moves an adapter by about one learning rate a
    number, however much the examples have to say."""

    def rate(self, hidden_size: int) -> float:
        """AdamW's rate for adapters on a model of this width: inversely proportional to it."""
        width = min(max(hidden_size, _NARROWEST), _WIDEST)
        return self.learning_rate * _WIDTH / width

    def passes(self, examples: int, steps_per_epoch: int) -> int:
        """Passes over the examples: ``epochs``, more of few examples and fewer of many."""
        affordable = max(1, min(self.epochs, _MOST_SEEN // examples))
        return max(affordable, -(-self.least_steps // steps_per_epoch))


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """Limits that a job is checked against, and the tokenizer of the model that the engines serve. 0: unknown, as with
    engines of earlier releases."""

    codec: TextCodec
    vocab_size: int
    max_train_tokens: int
    """Tokens of a document."""
    max_model_len: int
    """Tokens of the context."""
    teacher: str
    """Name of the second model that the engines have loaded; empty: none."""
    teacher_vocab_size: int


@dataclass(frozen=True, slots=True)
class DataRows:
    """Conversion of the rows of a JSONL file to a field of a job."""

    field: str
    model: type[SentModel]
    """Schema of an element of the field."""
    element: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Makes an element of a row; raises InvalidRequest."""


class OptimizerSettings(SentModel):
    """AdamW and its schedule."""

    learning_rate: float | None = Field(None, gt=0, le=1, exclude_if=absent)
    """None: by the method and the model (`Pace`)."""
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule behind the warm-up: the rate as it is, or a fall towards 0 at the end of the job."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


_REST = OptimizerSettings.model_fields.keys() - {"learning_rate"}


class PublishingJob(SentModel):
    """Fields of every job whose result is a version of an adapter."""

    adapter: AdapterName
    """The adapter that gets a new version."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between resumable checkpoints."""
    seed: int = Field(0, ge=0, lt=2**63)
    metadata: dict[str, str] = Field(default_factory=dict)
    webhook: WebhookUrl | None = Field(None, exclude_if=absent)
    """URL that is told of the job's end, beside those of TEMPER_WEBHOOK_URLS; TEMPER_WEBHOOK_ALLOW must cover it."""

    makes: ClassVar[Kind] = "adapter"
    """Kind of the version that comes of it."""


class JobBase(PublishingJob):
    """Fields of every training job, and what its kind says of itself.

    A new kind is a subclass in services/common/jobs/kinds, a module of the same name in services/trainer/jobs with a
    function `prepare`, and a line in services/common/jobs/registry.py.
    """

    start_from: str | None = Field(None, json_schema_extra=dict(POLICY_SCHEMA))
    """"name" or "name@n" to continue from. Default: the adapter's own current version if it exists, else a new
    adapter. "base" starts afresh even if the adapter exists."""
    attach: bool = True
    """Attach the new version to the base model's name when the job succeeds."""
    lora: LoraSettings = LoraSettings()
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Shorthand for optimizer.learning_rate."""
    learning_rate_multiplier: float | None = Field(None, gt=0, le=1000, exclude_if=absent)
    """Factor on the rate that the trainer chooses by the method and the model; only where no rate is given."""
    optimizer: OptimizerSettings = OptimizerSettings()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template for prompts that it renders, e.g. {"enable_thinking": true}."""
    prompt_format: Literal["chat", "raw"] = "chat"
    """Reading of a plain-string prompt: as one user message, or as text that is used as it is."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """Short documents are packed up to this many tokens a forward and backward; a longer one is alone. Gradients do not
    depend on it; memory does, and how long a request may wait for a layer. None: 2048 on a GPU, 512 on a CPU."""
    recompute: Recompute | None = None
    """Amount that the backward computes again instead of keeping it: "none" is fastest, "selective" (the inside of
    mixers and the first product of the MLP) keeps about a third of it, "full" (whole layers) a twentieth and costs a
    third more time. None: "none"."""
    gradient_checkpointing: bool = False
    """Shorthand for recompute "full"."""
    publish_if: PublishIf | None = None
    """Publish only if an evaluation improved, or the result is better on suites; otherwise the job fails and nothing
    changes."""
    attach_if: AttachIf | None = Field(None, exclude_if=absent)
    """Attach only if the result is better on suites; otherwise it is published alone."""
    candidate: bool | None = Field(None, exclude_if=absent)
    """Publish the version without making it current, for a canary to try it; attach must be false then."""
    dry_run: bool | None = Field(None, exclude_if=absent)
    """Only find out what the job would do: its record gets a report, and nothing is published."""

    pace: ClassVar[Pace]
    """Defaults of what the job leaves open."""
    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Named bodies for the API's description. Each is accepted as it is by `temper up`."""
    json_rules: ClassVar[Rules] = (
        true_only_with("gradient_checkpointing", if_any(recompute={"enum": ["full", None]})),
        only_with("attach_if", if_any(attach=True)),
        true_only_with("candidate", has(attach=False)),
        never(both(given("learning_rate"), given("learning_rate_multiplier"))),
    )

    def check_used(self) -> None:
        """Checks that no setting is without effect. Of submissions alone: a job that waits since an earlier release
        stays what it is.

        Raises:
            InvalidRequest: one is; names it.
        """

    @abstractmethod
    def check_tokens(self, served: ServedLimits) -> None:
        """Tokenizes and checks all data of the job. Blocking: call it in a thread.

        Raises:
            InvalidRequest: an example is over the limit and the job's policy is to refuse, nothing is left to train
                on, a token id is outside the vocabulary, or the chat template refuses a conversation.
        """

    @classmethod
    @abstractmethod
    def data_rows(cls, rows: Sequence[Mapping[str, Any]]) -> DataRows:
        """Conversion of the rows of a JSONL file to the data of the job.

        Raises:
            InvalidRequest: the rows cannot be the data of one job.
        """

    def scorers(self) -> Sequence[tuple[str, ScorerSettings]]:
        """The scorers that the job uses, each with its place in the job."""
        return ()

    @property
    def eval_metrics(self) -> Mapping[str, Better]:
        """Metrics that the job as it stands evaluates, and which way is better; publish_if may name these."""
        return {}

    @model_validator(mode="after")
    def _publish_if_is_measured(self) -> JobBase:
        check_publish_if(self.publish_if, self.eval_metrics, self.evaluation_way_out)
        return self

    @property
    def gates(self) -> Mapping[str, SuiteGate]:
        """The job's conditions on suites, by the field that they are of."""
        named = {"publish_if": self.publish_if, "attach_if": self.attach_if}
        return {field: gate for field, gate in named.items() if gate is not None and gate.asks}

    @model_validator(mode="after")
    def _attach_if_attaches(self) -> JobBase:
        if self.attach_if is not None and not self.attach:
            raise contradiction("attach is false, so attach_if would do nothing: leave one of them out", "attach_if")
        return self

    @model_validator(mode="after")
    def _a_candidate_is_not_attached(self) -> JobBase:
        if self.candidate and self.attach:
            raise contradiction("a candidate is tried before anything is attached: send attach: false", "candidate")
        return self

    @property
    def evaluation_way_out(self) -> str:
        """Advice for a job without evaluation that has a publish_if."""
        return "jobs of this kind compute no evaluation, so leave publish_if out, or name suites in it"

    @model_validator(mode="after")
    def _one_recomputation(self) -> JobBase:
        if self.gradient_checkpointing and self.recompute not in (None, "full"):
            raise ValueError(f'gradient_checkpointing means recompute "full", but recompute is "{self.recompute}"')
        return self

    @model_validator(mode="after")
    def _one_rate(self) -> JobBase:
        given = self.optimizer.model_fields_set
        # What the queue stores has every field of the optimizer, this one at its default.
        inside = self.optimizer.learning_rate if "learning_rate" in given and not given >= _REST else None
        if inside is not None and self.learning_rate is not None and inside != self.learning_rate:
            raise contradiction(
                f"learning_rate is {self.learning_rate:g} and optimizer.learning_rate {inside:g}: they are the same "
                "setting, give one of them",
                "learning_rate",
            )
        if self.learning_rate_multiplier is not None and self.named_learning_rate is not None:
            raise contradiction(
                "learning_rate_multiplier is a factor on the rate that is chosen for you, and a rate is given: leave "
                "one of them out",
                "learning_rate_multiplier",
            )
        return self

    @property
    def effective_recompute(self) -> Recompute:
        return "full" if self.gradient_checkpointing else self.recompute or "none"

    @property
    def named_learning_rate(self) -> float | None:
        """The rate that the job names, in either place; None: it leaves that open."""
        return self.optimizer.learning_rate if self.learning_rate is None else self.learning_rate
