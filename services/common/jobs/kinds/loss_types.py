"""Loss types of GRPO jobs, one line each. The trainer's part, which needs torch, is imported when a job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class LossTypeSpec(NamedTuple):
    """Loss type as a job names it."""

    implementation: str
    """The trainer's services.trainer.losses.policy.PolicyLossType, as "module:name"."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Defaults of clip_low and clip_high."""


LOSS_TYPES: Mapping[str, LossTypeSpec] = {
    "grpo": LossTypeSpec("services.trainer.losses.policy:GRPO"),
    "dapo": LossTypeSpec("services.trainer.losses.policy:DAPO"),
    "dr_grpo": LossTypeSpec("services.trainer.losses.policy:DR_GRPO"),
    "bnpo": LossTypeSpec("services.trainer.losses.policy:BNPO"),
    "cispo": LossTypeSpec("services.trainer.losses.policy:CISPO"),
    # What the GSPO paper clips with (arXiv 2507.18071, §5.1): a mean over a sequence moves far less than one token.
    "gspo": LossTypeSpec("services.trainer.losses.policy:GSPO", clip=(3e-4, 4e-4)),
}


class LossType(str):
    """Name of a loss type in LOSS_TYPES.

    Raises:
        ValueError: there is no such loss type.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> LossType:
        if name not in LOSS_TYPES:
            raise ValueError(f"{name!r} is no loss type: {', '.join(LOSS_TYPES)}")
        return super().__new__(cls, name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Schema of a field: one of the names, as a Literal of them would have it."""
        del source, handler
        return core_schema.no_info_after_validator_function(
            cls, core_schema.literal_schema(list(LOSS_TYPES)), serialization=core_schema.to_string_ser_schema()
        )
