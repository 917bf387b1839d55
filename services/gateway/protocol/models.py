"""Bodies of /v1/models and /v1/adapters.

A model has OpenAI's fields, and beside them Anthropic's, so that the clients of both read one list."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from services.common.adapters.names import NAME_SCHEMA
from services.common.jobs import MergeSettings
from services.common.validation.json_rules import Rules, at_least_one
from services.gateway.protocol.fields.base import RequestModel


class ModelObject(BaseModel):
    """The base model, an adapter, or one version of an adapter: what `model` of a request may be."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time from which this gateway serves it."""
    owned_by: Literal["temper"] = "temper"
    root: str
    """The checkpoint's name, or "adapter@version"."""
    parent: str | None
    """Parent of an adapter, the base model."""
    max_model_len: int | None
    """Tokens of prompt and answer together; null before an engine was reached."""
    adapter: str | None
    """The version that answers now; null: the base without an adapter."""
    attached: bool
    """This is the adapter that answers under the base model's name."""
    type: Literal["model"] = "model"
    display_name: str
    """The same as id."""
    created_at: str
    """`created` as RFC 3339 has it."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    """The same as max_model_len."""


class ModelList(BaseModel):
    """A page of them; all of them, if none was asked for."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


AdapterPath = Annotated[str, Path(json_schema_extra=dict(NAME_SCHEMA))]
"""An adapter's name in a path; what is wrong with it is said by check_adapter_name."""


class VersionRequest(RequestModel):
    """POST /v1/adapters/{name}/attach and /detach. The body may be left out."""

    version: int | None = Field(None, ge=1, lt=2**53)
    """attach: the version to attach, default the current one. detach: only if this version is attached."""


class MergeRequest(MergeSettings):
    """POST /v1/adapters/{name}/merge: a job that makes a new version of ``name``."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the entries that dare_* drop."""
    attach: bool = False
    """Attach the new version to the base model's name when the job succeeds."""
    metadata: dict[str, str] = Field(default_factory=dict)


class RollbackRequest(RequestModel):
    """POST /v1/adapters/{name}/rollback. The body may be left out."""

    version: int | None = Field(None, ge=1, lt=2**53)
    """The version to go back to; default: the newest one before the current one."""


class PruneRequest(RequestModel):
    """POST /v1/adapters/{name}/prune: what to keep. Both together keep what either keeps."""

    keep: int | None = Field(None, ge=1, lt=2**31)
    """Number of newest versions to keep."""
    days: float | None = Field(None, ge=0, le=1e6)
    """Versions that are younger than this."""
    dry_run: bool = False
    """Only say what would be removed."""

    json_rules: ClassVar[Rules] = (at_least_one("keep", "days"),)


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter, vLLM's body."""

    lora_name: Annotated[str, Field(json_schema_extra=dict(NAME_SCHEMA))]
    lora_path: str = Field(min_length=1, max_length=2000)
    """Directory below TEMPER_ADAPTERS_DIR, s3://bucket/prefix below TEMPER_ADAPTERS_S3, or a version, "name@n"."""
    load_inplace: bool = False
    """The name may be in use: its next requests are answered by what is loaded now."""
    is_3d_lora_weight: Literal[False] = False
    """Only false: experts' weights are matrices here."""


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter, vLLM's body."""

    lora_name: Annotated[str, Field(json_schema_extra=dict(NAME_SCHEMA))]
    lora_int_id: int | None = None
    """Accepted without effect: the name says which."""
