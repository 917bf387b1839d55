"""Bases of records and of what clients send: unknown fields are refused, and nothing is coerced."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from services.common.validation.integers import JsonIntegers
from services.common.validation.json_rules import Ruled


def absent(value: object) -> bool:
    """Whether a field is left out of a model's JSON (``exclude_if``).

    Such a field is one that the trainer chooses, or one that earlier releases did not have. Jobs without it are written
    as those releases wrote them, which idempotency keys and checkpoints stand for.
    """
    return value is None


class StrictModel(BaseModel):
    """Refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class SentModel(JsonIntegers, Ruled, StrictModel):
    """What clients send: no coerced types either, so that true is no number and "1" none."""

    model_config = ConfigDict(strict=True)
