"""What /v1/models answers: OpenAI's fields, and beside them Anthropic's, so that the clients of both read one list."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


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
    """All of them, in one page."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
