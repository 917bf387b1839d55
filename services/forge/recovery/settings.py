"""Settings of a recovery, and its report. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from services.common.errors import InvalidRequest
from services.common.jobs import LoraSettings, OptimizerSettings

Method: TypeAlias = Literal["sft", "distill"]
METHODS: tuple[Method, ...] = get_args(Method)
Trains: TypeAlias = Literal["neighbours", "lora"]
TRAINS: tuple[Trains, ...] = get_args(Trains)
OptimizerStates: TypeAlias = Literal["float32", "8bit"]
OPTIMIZER_STATES: tuple[OptimizerStates, ...] = get_args(OptimizerStates)
RECOMPUTES = ("none", "selective", "full")
_RATES: Mapping[Trains, float] = {"neighbours": 1e-3, "lora": 2e-3}
"""Peak rates for a hidden size of 256; see learning_rate()."""
_RATE_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    """How a smaller checkpoint learns again.

    Raises:
        InvalidRequest: a number out of its range, or two fields that contradict each other; names the field.
    """

    method: Method = "distill"
    """`sft`: the loss is on the data's completions. `distill`: the divergence from the teacher at their tokens, and at
    those of completions that the student samples (`on_policy`)."""
    trains: Trains = "neighbours"
    """`neighbours`: all norms, and the matrices next to what was cut. `lora`: low-rank updates of all matrices, added
    to them at the end."""
    steps: int = 200
    """Optimizer steps, at most: it may stop earlier by `patience`."""
    batch_tokens: int = 4096
    """Tokens of a step, packed without padding."""
    tokens_per_forward: int = 2048
    """Tokens in memory at once; gradients of a step's forwards add up."""
    max_document_tokens: int = 4096
    """A longer document is cut off behind these."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(schedule="cosine", warmup_steps=10))
    """AdamW and its schedule; without a learning rate one that suits the model's width."""
    optimizer_states: OptimizerStates = "float32"
    """`8bit`: AdamW's moments in blocks of 256 numbers that share a scale, a byte each."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    beta: float = 0.0
    """Of the divergence: 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher), between them Jensen–Shannon."""
    temperature: float = 1.0
    """Of both sides of the divergence."""
    on_policy: float = 0.0
    """Share of a distilled step's documents whose completion the student samples."""
    max_new_tokens: int = 128
    """Tokens of a sampled completion, at most."""
    sampling_temperature: float = 1.0
    held_out_share: float = 0.1
    """Share of the examples that are held out, where no file of held-out examples is given."""
    eval_every: int = 25
    """Steps between two looks at the held-out loss. What is written is the state with the lowest one."""
    patience: int | None = 4
    """Looks without a lower held-out loss after which it stops; None: never."""
    save_every: int = 25
    """Steps between two states on disk that it resumes from."""
    recompute: Literal["none", "selective", "full"] = "selective"
    """What the backward computes again instead of keeping it."""
    seed: int = 0
    """Of the order of the data, of the split and of samples."""
    device: str = "cpu"
    dtype: str = "auto"
    """Of weights while training: "float32", "bfloat16", or "auto" (float32 on a CPU)."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch_tokens", "tokens_per_forward", "max_new_tokens", "eval_every", "save_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1", param=name)
        if self.max_document_tokens < 2:
            raise InvalidRequest("max_document_tokens must be at least 2", param="max_document_tokens")
        if self.patience is not None and self.patience < 1:
            raise InvalidRequest("patience must be at least 1, or left out", param="patience")
        for name in ("temperature", "sampling_temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidRequest(f"{name} must be above 0", param=name)
        for name in ("beta", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidRequest(f"{name} must be between 0 and 1", param=name)
        if not 0 < self.held_out_share < 1:
            raise InvalidRequest("held_out_share must be between 0 and 1: early stop needs examples", param="held_out")
        if self.on_policy and self.method != "distill":
            raise InvalidRequest(
                "on_policy: what the student samples has no right answer to learn; take method distill",
                param="on_policy",
            )
        for name, known in (("method", METHODS), ("trains", TRAINS), ("optimizer_states", OPTIMIZER_STATES)):
            if getattr(self, name) not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(known)}", param=name)
        if self.recompute not in RECOMPUTES:
            raise InvalidRequest(f"recompute must be one of {', '.join(RECOMPUTES)}", param="recompute")

    def learning_rate(self, hidden_size: int) -> float:
        """Peak rate: the given one, or one that falls with the square root of the model's width."""
        given = self.optimizer.learning_rate
        return _RATES[self.trains] * (_RATE_WIDTH / hidden_size) ** 0.5 if given is None else given

    def record(self) -> dict[str, Any]:
        """Settings that the result depends on, as JSON."""
        plain = asdict(self) | {
            "optimizer": self.optimizer.model_dump(mode="json"),
            "lora": self.lora.model_dump(mode="json"),
        }
        if self.trains != "lora":
            del plain["lora"]
        if self.method == "sft":
            for name in ("beta", "temperature"):
                del plain[name]
        if not self.on_policy:
            for name in ("max_new_tokens", "sampling_temperature"):
                del plain[name]
        del plain["save_every"]
        return plain


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery came to."""

    out: Path
    digest: str
    """Of the recovered checkpoint's weights."""
    steps: int
    """Steps that were made."""
    best_step: int
    """Steps after which the held-out loss was lowest: the weights that were written."""
    stopped_early: bool
    tokens: int
    """Tokens that were learnt from: read by the student with gradients."""
    sampled_tokens: int
    trained_parameters: int
    held_out_before: float
    """Mean loss a token on the held-out examples: their negative log-likelihood, or the divergence from the
    teacher."""
    held_out_after: float
    seconds: float
    """Of computing, those of earlier processes counted."""
    memory_bytes: int
    """Plan of what it needs at once."""

    def summary(self) -> dict[str, Any]:
        """Report as JSON."""
        return asdict(self) | {"out": str(self.out)}
