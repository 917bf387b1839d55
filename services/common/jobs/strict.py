"""The base of everything in a job."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from services.common.integers import JsonIntegers
from services.common.json_rules import Ruled


class StrictModel(BaseModel):
    """Refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class SentModel(JsonIntegers, Ruled, StrictModel):
    """What clients send: no coerced types either, so that true is no number and "1" none."""

    model_config = ConfigDict(strict=True)
