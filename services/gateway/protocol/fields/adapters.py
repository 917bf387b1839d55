"""Fields that say who answers: the model, an adapter, or several."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from services.common.adapters.composition import (
    COMPOSITION_SCHEMA,
    MAX_MEMBERS,
    MAX_SCALE,
    MAX_TEXT,
    MIN_SCALE,
    Composition,
    Member,
)
from services.common.adapters.names import AdapterRef, parse_adapter_ref
from services.common.errors import InvalidRequest
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, at_most_one
from services.gateway.protocol.fields.base import RequestModel


class ScaledAdapter(RequestModel):
    """One adapter of several that answer together."""

    adapter: AdapterRef
    """"name@n", or "name" for its current version."""
    scale: float = Field(
        1.0,
        ge=-MAX_SCALE,
        le=MAX_SCALE,
        json_schema_extra={"anyOf": [{"minimum": MIN_SCALE}, {"maximum": -MIN_SCALE}]},
    )
    """Factor of what it adds to the model. Negative: what it does is taken away. Its magnitude is at least 0.000001."""


class ModelFields(RequestModel):
    """Who answers. null is the same as leaving a field out."""

    model: str = Field(min_length=1, max_length=MAX_TEXT)
    """The base model's name (the attached adapter answers, if one is), an adapter, "adapter@version", or several
    adapters with "+" between, each with a scale behind "*" or without: "a@3*0.7+b"."""
    adapters: Annotated[list[ScaledAdapter], Field(min_length=1, max_length=MAX_MEMBERS)] | None = None
    """Adapters that answer together, or one with a scale: what they add to the model is summed, each times its scale.
    `model` is then the base model's name, or names the same."""

    @property
    def composition(self) -> Composition | None:
        """What `adapters` names. Raises InvalidRequest, which names the field."""
        if self.adapters is None:
            return None
        named = [(*parse_adapter_ref(one.adapter), one.scale) for one in self.adapters]
        return Composition.of(Member(name, version, scale) for name, version, scale in named)

    @model_validator(mode="after")
    def _composed(self) -> ModelFields:
        try:
            _ = self.composition
        except InvalidRequest as error:
            raise contradiction(f"adapters: {error.message}", "adapters") from error
        return self


class PolicyFields(ModelFields):
    """Who answers, and with which priority. null is the same as leaving a field out."""

    adapter: str | None = Field(None, min_length=1, max_length=MAX_TEXT, json_schema_extra=dict(COMPOSITION_SCHEMA))
    """Chooses the policy whatever `model` says: "name", "name@version", several with "+" between as in `model`, or
    "base" for the model without adapter."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Only requests with the same salt share cached prompt state."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Lower is served first; default 0."""

    json_rules: ClassVar[Rules] = (at_most_one("adapter", "adapters"),)

    @model_validator(mode="after")
    def _one_choice(self) -> PolicyFields:
        if self.adapter is not None and self.adapters is not None:
            raise contradiction("adapter and adapters both say who answers: send one of them", "adapters")
        return self
