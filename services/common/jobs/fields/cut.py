"""`cut`: when the sampling of a round ends although some of its rollouts have not."""

from __future__ import annotations

import math

from pydantic import Field

from services.common.validation.strict_models import SentModel

ROLLOUTS_REQUEUED, ROLLOUTS_DROPPED, ROLLOUTS_CHANGED = "rollouts_requeued", "rollouts_dropped", "rollouts_changed"
"""Metrics of the step that begins a round: its rollouts that were cut and go on in the next round, those that were cut
and do not, and how often one under way went on with a newer policy. Sums over steps are the job's."""


class Cut(SentModel):
    """A round is sampled until a fraction of its rollouts has ended; those that are left are cut there. A group with
    such a rollout waits for the next round, where the rollout goes on, and is learnt from once it is whole."""

    fraction: float = Field(0.9, gt=0, lt=1)
    """Of the rollouts that the round samples, rounded up: so many are waited for."""
    requeues: int = Field(1, ge=0, le=8)
    """Rounds that a group may wait. What is cut after them, or in the last round, is dropped, and the group is learnt
    from without it. 0: what is cut is dropped at once."""

    def enough(self, count: int) -> int:
        """Rollouts that are waited for, of so many."""
        return math.ceil(self.fraction * count - 1e-9)
