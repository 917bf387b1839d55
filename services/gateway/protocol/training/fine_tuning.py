"""Bodies of /v1/fine_tuning/jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import NULL, Rules, both, either, has, if_any
from services.gateway.protocol.batches import MetadataKey, MetadataValue
from services.gateway.protocol.fields.base import AnswerModel, RequestModel, unsupported
from services.gateway.protocol.fields.listing import Listing

Auto: TypeAlias = Literal["auto"]
AUTO: Final = "auto"
MethodName: TypeAlias = Literal["supervised", "dpo", "reinforcement"]
_GRADERS: Mapping[str, str] = {
    "text_similarity": "none of its measures is a reward here; compare texts with string_check, or post a job to "
    "/v1/train/grpo with a webhook reward",
    "python": "post a job to /v1/train/grpo with a python_tests or a webhook reward",
    "score_model": "post a job to /v1/train/grpo with a judge reward, which reads the judge's probabilities instead of "
    "a number that it writes",
    "label_model": "post a job to /v1/train/grpo with a judge reward and verdicts",
    "endpoint": "post a job to /v1/train/grpo with a webhook reward",
}


class Hyperparameters(RequestModel):
    """Hyperparameters of every method; "auto" leaves one to the trainer."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=100)] | None = None
    """Passes over the training file."""
    batch_size: Auto | Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Lines an optimizer step; of reinforcement, prompts a round."""
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=1000)] | None = None
    """Factor on the default rate of the method and the model."""


class DpoHyperparameters(Hyperparameters):
    """Hyperparameters of dpo."""

    beta: Auto | Annotated[float, Field(gt=0, le=100)] | None = None
    """Strength with which the model is held to the one that it starts from."""


class ReinforcementHyperparameters(Hyperparameters):
    """Hyperparameters of reinforcement."""

    compute_multiplier: Auto | Annotated[float, Field(gt=0, le=128)] | None = None
    """Completions of each prompt, as a multiple of 8."""
    eval_interval: Auto | Annotated[int, Field(ge=1)] | None = None
    """Rounds between evaluations on the validation file."""
    eval_samples: Auto | Literal[1] | None = None
    """Only 1: prompts of the validation file are answered once, without chance."""
    reasoning_effort: Literal["default"] | None = None
    """Only "default": the chat template says whether the model thinks."""


class StringCheckGrader(RequestModel):
    """1 if the answer is (eq) or contains (like, ilike without case) the reference, else 0."""

    type: Literal["string_check"]
    name: str = Field(max_length=256)
    input: str = Field(max_length=1000)
    """`{{sample.output_text}}`: the answer, without its thinking."""
    reference: str = Field(max_length=20_000)
    """Text, with `{{item.FIELD}}` for fields of the prompt's line."""
    operation: Literal["eq", "like", "ilike"]

    @model_validator(mode="before")
    @classmethod
    def _no_inequality(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("operation") == "ne":
            raise unsupported(
                "operation ne is not supported: no reward is 1 where the answer is another; use eq, like or ilike, or "
                "subtract an eq in a multi grader",
                "operation",
            )
        return value


def _known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _GRADERS:
        raise unsupported(f"graders of type {kind} are not supported: {_GRADERS[kind]}")
    return value


class MultiGrader(RequestModel):
    """A weighted sum of graders."""

    type: Literal["multi"]
    name: str = Field(max_length=256)
    graders: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)],
        Annotated[StringCheckGrader, BeforeValidator(_known)],
    ] = Field(min_length=1, max_length=16)
    calculate_output: str = Field(min_length=1, max_length=1000)
    """Sum of multiples of graders, such as `0.8 * exact + 0.2 * named`."""


Grader = Annotated[StringCheckGrader | MultiGrader, Field(discriminator="type"), BeforeValidator(_known)]


class SupervisedMethod(RequestModel):
    """Settings of supervised fine-tuning."""

    hyperparameters: Hyperparameters | None = None


class DpoMethod(RequestModel):
    """Settings of direct preference optimisation."""

    hyperparameters: DpoHyperparameters | None = None


class ReinforcementMethod(RequestModel):
    """Settings of reinforcement fine-tuning."""

    refused: ClassVar[Mapping[str, str]] = {
        "response_format": "what a completion must look like is for the grader to say",
    }

    grader: Grader
    hyperparameters: ReinforcementHyperparameters | None = None


class Method(RequestModel):
    """Method with its settings, which stand under its name."""

    type: MethodName
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None
    reinforcement: ReinforcementMethod | None = None

    json_rules: ClassVar[Rules] = (
        either(
            both(has(type="supervised"), if_any(dpo=NULL, reinforcement=NULL)),
            both(has(type="dpo"), if_any(supervised=NULL, reinforcement=NULL)),
            both(has(type="reinforcement", reinforcement={"type": "object"}), if_any(supervised=NULL, dpo=NULL)),
        ),
    )

    @model_validator(mode="after")
    def _of_its_type(self) -> Method:
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise contradiction(f"{name} would do nothing here: the method's type is {self.type}", name)
        if self.type == "reinforcement" and self.reinforcement is None:
            raise contradiction("reinforcement is missing: it has the grader", "reinforcement")
        return self


class FineTuningRequest(RequestModel):
    """A model that is to learn from a file with the purpose "fine-tune"."""

    refused: ClassVar[Mapping[str, str]] = {
        "integrations": "metrics are among the job's events, and in Prometheus",
    }

    model: str = Field(min_length=1, max_length=100)
    """Name of the base model, or of an adapter ("name" or "name@n") to go on from."""
    training_file: str = Field(min_length=1, max_length=64)
    validation_file: str | None = Field(None, min_length=1, max_length=64)
    method: Method | None = None
    """Default: supervised."""
    hyperparameters: Hyperparameters | None = None
    """The older place of those of supervised fine-tuning."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,52}$")] | None = None
    """Part of the new model's name: letters, digits, - and _, up to 52 of them, because adapters' names have 64."""
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)

    json_rules: ClassVar[Rules] = (either(if_any(hyperparameters=NULL), if_any(method=NULL)),)

    @model_validator(mode="after")
    def _one_place(self) -> FineTuningRequest:
        if self.hyperparameters is not None and self.method is not None:
            raise contradiction("hyperparameters belong into method: leave this field out", "hyperparameters")
        return self

    @property
    def chosen(self) -> Method:
        """Method, wherever the request says it."""
        if self.method is not None:
            return self.method
        return Method(type="supervised", supervised=SupervisedMethod(hyperparameters=self.hyperparameters))


class FineTuningError(AnswerModel):
    """Why a job has failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(AnswerModel):
    """A fine-tuning job, as OpenAI shows it. Times are unix seconds."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    error: FineTuningError | None
    model: str
    fine_tuned_model: str | None
    """Version of an adapter that answers by this name."""
    organization_id: str
    training_file: str
    validation_file: str | None
    result_files: list[str]
    """Empty: metrics are among the events."""
    hyperparameters: dict[str, Any]
    """Those of supervised jobs."""
    method: dict[str, Any]
    seed: int
    trained_tokens: int | None
    integrations: list[Any]
    metadata: dict[str, str] | None


class FineTuningJobs(AnswerModel, Listing):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


class FineTuningEvent(AnswerModel):
    """Something that happened to a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class FineTuningEvents(AnswerModel):
    """A page of events, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class FineTuningCheckpoint(AnswerModel):
    """Weights of a job as they were behind one of its steps, which answer requests."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    """Version of an adapter that answers by this name."""
    fine_tuning_job_id: str
    metrics: dict[str, float]
    """Metrics of the job by then, by the names that its events have."""
    step_number: int


class FineTuningCheckpoints(AnswerModel):
    """A page of checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[FineTuningCheckpoint]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
