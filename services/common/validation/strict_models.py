"""Bases of records and of what clients send: unknown fields are refused, and nothing is coerced."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.common.validation.integers import JsonIntegers
from services.common.validation.json_rules import Ruled


def absent(value: object) -> bool:
    """True if a field is left out of a model's JSON (``exclude_if``).

    Such a field is one that the trainer chooses, or one that earlier releases did not have. Jobs without it are written
    as those releases wrote them, which idempotency keys and checkpoints stand for.
    """
    return value is None


def check_finite(value: Any) -> Any:
    """Returns a JSON value.

    Raises:
        ValueError: it contains NaN or an infinity.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and infinity are not allowed")
    if isinstance(value, dict):
        for member in value.values():
            check_finite(member)
    elif isinstance(value, list):
        for member in value:
            check_finite(member)
    return value


class StrictModel(BaseModel):
    """Refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class SentModel(JsonIntegers, Ruled, StrictModel):
    """Model of what clients send: no coerced types either, so that true is no number and "1" none."""

    model_config = ConfigDict(strict=True)
