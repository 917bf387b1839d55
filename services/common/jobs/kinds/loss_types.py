"""Loss types of GRPO jobs, one line each. The trainer's part, which needs torch, is imported when a job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias


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

if TYPE_CHECKING:
    LossType: TypeAlias = str
else:
    LossType = Literal[tuple(LOSS_TYPES)]
