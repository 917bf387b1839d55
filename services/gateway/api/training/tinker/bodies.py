"""Bodies that Tinker's SDK sends as JSON. What only other releases of it send is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import InvalidRequest
from services.common.validation.errors import problem
from services.gateway.protocol.fields.base import RequestModel, TokenId

Metadata = dict[str, Any]
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 365 * 86400
Ttl = Annotated[int, Field(ge=SHORTEST_TTL, le=LONGEST_TTL)]
Seq = Annotated[int, Field(ge=1, lt=2**53)]

Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], data: Mapping[str, Any]) -> Model:
    """What Temper makes of a request. Raises InvalidRequest that names what is wrong with it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(problem(error, model, data)) from error


class _Body(RequestModel):
    type: str | None = None
    """Tinker's name of the request; the path says the same."""


class ClientConfig(_Body):
    """POST /api/v1/client/config and /api/v1/client/dynamic_config."""

    sdk_version: str = Field(max_length=64)


class CreateSession(_Body):
    """POST /api/v1/create_session."""

    tags: list[Annotated[str, Field(max_length=256)]] = Field(max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: str = Field(max_length=64)
    project_id: str | None = Field(None, max_length=256)
    display_name: str | None = Field(None, max_length=256)


class Heartbeat(_Body):
    """POST /api/v1/session_heartbeat."""

    session_id: str


class Lora(RequestModel):
    """Shape of the adapter."""

    rank: int = Field(ge=1, le=256)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(RequestModel):
    """Optimizer of a training run: AdamW is the only one."""

    type: Literal["adamw"] = "adamw"


class CreateModel(_Body):
    """POST /api/v1/create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10_000)
    base_model: str = Field(max_length=256)
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class OfModel(_Body):
    """POST /api/v1/get_info and /api/v1/unload_model."""

    model_id: str


class Adam(RequestModel):
    """AdamW of one step."""

    learning_rate: float = Field(1e-4, ge=0, le=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1e3)
    grad_clip_norm: float = Field(0.0, ge=0)
    """0: gradients are not clipped."""


class Numbered(BaseModel):
    """Request of a run, as far as it has a number. What is wrong with the rest of it is said by the future, because the
    numbers behind it wait for this one."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model_id: str
    seq_id: Seq

    @property
    def sent(self) -> dict[str, Any]:
        """All of it."""
        return {"model_id": self.model_id, "seq_id": self.seq_id, **(self.model_extra or {})}


class OptimStep(_Body):
    """POST /api/v1/optim_step."""

    model_id: str
    seq_id: Seq
    adam_params: Adam

    refused: ClassVar[Mapping[str, str]] = {"optimizer_params": "AdamW is the only optimizer here: send AdamParams"}


class SaveWeights(_Body):
    """POST /api/v1/save_weights."""

    model_id: str
    path: str | None = None
    seq_id: Seq
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(_Body):
    """POST /api/v1/save_weights_for_sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0, lt=10**9)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Seq
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None


class _Source(_Body):
    base_model: str | None = Field(None, max_length=256)
    path: str = Field(max_length=512)
    optimizer: bool
    optimizer_config: Optimizer | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "weights_access_token": "checkpoints are read with the API key of the request: leave it out"
    }


class LoadWeights(_Source):
    """POST /api/v1/load_weights into a run that exists."""

    model_id: str
    seq_id: Seq


class LoadNewRun(_Source):
    """POST /api/v1/load_weights into a new run."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10_000)
    user_metadata: Metadata | None = None


class CreateSampler(_Body):
    """POST /api/v1/create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str | None = Field(None, max_length=256)
    model_path: str | None = Field(None, max_length=512)


class TextChunk(RequestModel):
    """Tokens."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId]


class ModelInput(RequestModel):
    """Tokens in pieces; images and sound are refused."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(RequestModel):
    """Sampling, as SDK's SamplingParams has it."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | list[TokenId] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(_Body):
    """POST /api/v1/asample."""

    num_samples: int = Field(1, ge=1)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = Field(None, max_length=256)
    model_path: str | None = Field(None, max_length=512)
    sampling_session_id: str | None = None
    seq_id: int | None = Field(None, ge=0, lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=20)
    topk_sample_logprobs: int = Field(0, ge=0, le=20)
    prompt_alt_tokens_k: Literal[0] = 0
    """Draws from the distribution at each token of the prompt are not made."""
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: Literal[False] | None = None
    """What StableReinforce needs is not recorded."""

    refused: ClassVar[Mapping[str, str]] = {
        "target_prompt_logprobs": "log-probabilities are those of the prompt's own tokens and of topk_prompt_logprobs "
        "alternatives; forward has those of any target_tokens"
    }


class Retrieve(_Body):
    """POST /api/v1/retrieve_future."""

    request_id: str = Field(max_length=1 << 16)
    allow_metadata_only: bool = False


class Cancel(_Body):
    """POST /api/v1/cancel_future."""

    request_id: str = Field(max_length=1 << 16)


class TtlChange(_Body):
    """PUT …/ttl."""

    ttl_seconds: Ttl | None = None


class WeightsInfo(_Body):
    """POST /api/v1/weights_info."""

    tinker_path: str = Field(max_length=512)


class Finish(_Body):
    """POST /api/v1/sessions/{id}/finish."""

    reason: Metadata
    detail: str | None = Field(None, max_length=4096)
