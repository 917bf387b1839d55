"""A smaller model of a checkpoint: the settings of a forge run, and its request as a job. It makes no version of an
adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from services.common.jobs.base import OptimizerSettings, Recompute
from services.common.jobs.fields.gates import MAX_SUITES
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.fields.refs import SuiteRef
from services.common.jobs.kinds.sft import SftExample
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import SOME, Rules, at_least_one, both, either, has, if_any, left_out
from services.common.validation.strict_models import SentModel

ImportanceMethod: TypeAlias = Literal["weights", "activations", "gradients", "leave_one_out", "random"]
IMPORTANCE_METHODS: tuple[ImportanceMethod, ...] = get_args(ImportanceMethod)
NEED_DATA: frozenset[ImportanceMethod] = frozenset(("activations", "gradients", "leave_one_out"))
"""Methods that measure on data."""
RecoveryMethod: TypeAlias = Literal["sft", "distill"]
MOST_CYCLES = 16
STORED = "forged/"
"""Prefix of the object store below which each job's checkpoint is, by the job's id."""


_LEVEL = r"[0-9]{1,9}(\.[0-9]{1,9})?%|[1-9][0-9]{0,8}"


def _as_level(value: Any) -> Any:
    # YAML and JSON write a number of units as a number; True is none.
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and not re.fullmatch(_LEVEL, text):
        raise ValueError(f"write a share like 25%, or a number of units, not {text[:40]!r}")
    return text


LevelText = Annotated[
    str,
    BeforeValidator(_as_level, json_schema_input_type=Annotated[str, Field(pattern=f"^({_LEVEL})$")]),
]
"""Share of the units that go ("25%"), or a number of them."""


class ForgeImportance(SentModel):
    """Measurement of how much each unit matters."""

    method: ImportanceMethod = "activations"
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that are read of the data; None: all."""
    tokens_per_forward: int = Field(4096, ge=1)
    """Tokens in memory at once."""
    sample_tokens: int = Field(1024, ge=1)
    """Tokens that leave_one_out compares losses on."""


class ForgePrune(SentModel):
    """Units that go, of the whole model over all cycles together."""

    layers: LevelText | None = None
    kv_groups: LevelText | None = None
    """KV heads with their query heads, of each attention layer."""
    key_heads: LevelText | None = None
    """DeltaNet key heads with their value heads, of each DeltaNet layer."""
    mlp_channels: LevelText | None = None
    """Of each layer."""
    cycles: int = Field(1, ge=1, le=MOST_CYCLES)
    """Times that importance is measured, units are cut out, and the rest recovers: each cycle takes its part."""

    json_rules: ClassVar[Rules] = (at_least_one("layers", "kv_groups", "key_heads", "mlp_channels"),)

    @model_validator(mode="after")
    def _something_goes(self) -> ForgePrune:
        if not self.levels:
            raise ValueError(
                'say what is to go: layers, kv_groups, key_heads or mlp_channels, e.g. mlp_channels: "25%"'
            )
        return self

    @property
    def levels(self) -> dict[str, str]:
        """Kind of units → level."""
        names = ("layers", "kv_groups", "key_heads", "mlp_channels")
        return {name: level for name in names if (level := getattr(self, name)) is not None}


class ForgeRecover(SentModel):
    """Training after each cut, in which what is left learns to do without what went."""

    method: RecoveryMethod = "distill"
    """"distill": from the model before any cut. "sft": from the data alone."""
    trains: Literal["neighbours", "lora"] = "neighbours"
    """All norms and the matrices next to what was cut, or low-rank updates of all matrices, added at the end."""
    steps: int = Field(200, ge=1)
    """Optimizer steps of a cycle, at most."""
    batch_tokens: int = Field(4096, ge=1)
    """Tokens of a step, packed without padding."""
    tokens_per_forward: int = Field(2048, ge=1)
    """Tokens in memory at once."""
    max_document_tokens: int = Field(4096, ge=2)
    """A longer document is cut off behind these."""
    optimizer: OptimizerSettings = OptimizerSettings(schedule="cosine", warmup_steps=10)
    optimizer_states: Literal["float32", "8bit"] = "float32"
    lora: LoraSettings = LoraSettings()
    beta: float = Field(0.0, ge=0, le=1)
    """Of the divergence: 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher)."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Of both sides of the divergence."""
    on_policy: float = Field(0.0, ge=0, le=1)
    """Share of a distilled step's documents whose completion the student samples."""
    max_new_tokens: int = Field(128, ge=1)
    """Tokens of a sampled completion, at most."""
    sampling_temperature: float = Field(1.0, gt=0, le=100)
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the data that is held out, where there are no held-out examples of their own."""
    eval_every: int = Field(25, ge=1)
    """Steps between two looks at the held-out loss. What is kept is the state with the lowest one."""
    patience: int | None = Field(4, ge=1)
    """Looks without a lower held-out loss after which a cycle stops; None: never."""
    save_every: int = Field(25, ge=1)
    """Steps between two states on disk."""
    recompute: Recompute = "selective"

    json_rules: ClassVar[Rules] = (either(if_any(on_policy=0), if_any(method="distill")),)

    @model_validator(mode="after")
    def _samples_have_a_teacher(self) -> ForgeRecover:
        if self.on_policy and self.method != "distill":
            raise ValueError("on_policy: what the student samples has no right answer to learn; take method distill")
        return self


class ForgeSettings(SentModel):
    """What a forge run does, wherever its model and its data come from."""

    prune: ForgePrune
    importance: ForgeImportance = ForgeImportance()
    recover: ForgeRecover | None = None
    """None: no training between the cut and the evaluation."""
    quantize: Literal["float8"] | None = None
    """Format that the matrices get at the end; None: they stay as they are."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of random importance, of the order of training data and of sampled answers."""
    max_shard_gb: float = Field(2.0, ge=0.01, le=5)
    """Of one safetensors file, in GB."""

    @property
    def reads_data(self) -> bool:
        """Whether anything is measured on data or learnt from them."""
        return self.importance.method in NEED_DATA or self.recover is not None


class ForgeJob(ForgeSettings):
    """Makes a smaller model of the one that the engines serve: importance, cut, recovery, evaluation before and after.

    The result is a checkpoint in the object store, with a model card and a record; the engines go on serving theirs.
    """

    request_examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "weights": {
            "name": "smaller",
            "importance": {"method": "weights"},
            "prune": {"mlp_channels": "25%"},
        }
    }

    kind: Literal["forge"] = "forge"
    name: str = Field("forged", min_length=1, max_length=100)
    """Title of the model card. The checkpoint is s3://BUCKET/forged/JOB."""
    examples: list[SftExample] = Field(default_factory=list)
    """Data that importance is measured on and that recovery learns from, as SFT takes them."""
    eval_examples: list[SftExample] = Field(default_factory=list)
    """Held-out examples of recovery."""
    suites: list[SuiteRef] = Field(default_factory=list, max_length=MAX_SUITES)
    """Suites that the model is evaluated on before and after, each "name" or "name@n"."""
    metadata: dict[str, str] = Field(default_factory=dict)

    adapter: ClassVar[str] = ""
    """No adapter gets a version, so that no job of an adapter waits for this one."""
    json_rules: ClassVar[Rules] = (
        either(
            has(examples=SOME),
            both(has(importance=has(method={"enum": ["weights", "random"]})), left_out("recover")),
        ),
    )

    @field_validator("suites")
    @classmethod
    def _no_twins(cls, suites: list[str]) -> list[str]:
        for name in suites:
            if suites.count(name) > 1:
                raise ValueError(f"{name} is among the suites more than once: leave it out")
        return suites

    @model_validator(mode="after")
    def _has_data(self) -> ForgeJob:
        if self.reads_data and not self.examples:
            what = (
                "recover learns from" if self.recover is not None else f"importance by {self.importance.method} needs"
            )
            message = f'{what} examples: give some, or take importance.method "weights" and no recover'
            raise contradiction(message, "examples")
        return self
