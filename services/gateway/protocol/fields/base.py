"""Base models of requests and answers, and the marks of prompt caching.

All that clients say about caching is accepted without effect: the beginning of every prompt is cached, and found again,
by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from services.common.validation.integers import JsonIntegers
from services.common.validation.json_rules import NULL, Ruled
from services.common.validation.strict_models import check_finite

_MOST_FIELDS = 200
"""Limit of the fields of a body; no model has so many."""


def unsupported(message: str, param: str | None = None, *, code: str = "unsupported_parameter") -> PydanticCustomError:
    """The error for a field or value of OpenAI's API that Temper does not have. ``message`` says what to do.

    Args:
        param: the field, when the error is raised by a validator of its whole model.
        code: of the error, where clients know a special one.
    """
    return PydanticCustomError("unsupported", "{message}", {"message": message, "param": param, "code": code})


class RequestModel(JsonIntegers, Ruled):
    """Refuses unknown fields, coerced types, NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of OpenAI's API that are known and refused, with what to do instead. null counts as not given."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > _MOST_FIELDS:
            raise cls._unknown(body)
        if cls.refused.keys().isdisjoint(body):
            return body
        for field, instead in cls.refused.items():
            if body.get(field) is not None:
                raise unsupported(f"{field} is not supported: {instead}", field)
        return {key: value for key, value in body.items() if key not in cls.refused}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = super().__get_pydantic_json_schema__(core_schema, handler)
        properties = handler.resolve_ref_schema(described).setdefault("properties", {})
        for field, instead in cls.refused.items():
            properties[field] = {**NULL, "description": f"Not supported: {instead}."}
        return described

    @classmethod
    def _unknown(cls, body: dict[str, Any]) -> PydanticCustomError:
        """The error of the first field that no model has: those of a million fields would fill the memory."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        param = next(key for key in body if key not in known and key not in cls.refused)
        return PydanticCustomError("extra_forbidden", "unknown field", {"param": param})


class AnswerModel(BaseModel):
    """Part of an answer: exact, nothing beside what is described."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


JsonObject = Annotated[dict[str, Any], AfterValidator(check_finite)]
"""Any JSON object without NaN or infinity."""
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class CacheControl(RequestModel):
    """Anthropic's mark of the end of what should be cached. Accepted without effect: every beginning is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = Field(None, max_length=64)


class CacheBreakpoint(RequestModel):
    """OpenAI's mark of the same. Accepted without effect."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(RequestModel):
    """OpenAI's options of the cache. Accepted without effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = None
    prewarm: Literal[False] | None = None
    """Only false: every request is answered."""
