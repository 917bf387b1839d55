"""The base of everything in a job."""

from __future__ import annotations

from pydantic import ConfigDict

from services.common.json_rules import Ruled


class StrictModel(Ruled):
    """Refuses unknown fields, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
