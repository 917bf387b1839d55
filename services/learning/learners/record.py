"""Learner as data: its policy, where its cycle stands, and what has happened."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from pydantic import Field

from services.common.storage.ids import ulid_of
from services.common.validation.strict_models import StrictModel
from services.learning.learners.policy import LearnerPolicy

State: TypeAlias = Literal["collecting", "preparing", "training", "evaluating", "canary", "stopped"]
STATES: Final[tuple[State, ...]] = ("collecting", "preparing", "training", "evaluating", "canary", "stopped")
Outcome: TypeAlias = Literal["promoted", "rejected", "rolled_back", "superseded", "failed"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("promoted", "rejected", "rolled_back", "superseded", "failed")
"""superseded: somebody else moved the adapter during the canary. failed: a step could not be done."""
EventKind: TypeAlias = Literal[
    "collecting",
    "preparing",
    "data",
    "training",
    "evaluating",
    "canary",
    "promoted",
    "rejected",
    "rolled_back",
    "superseded",
    "failed",
    "stopped",
    "paused",
    "resumed",
    "changed",
]


class JobTime(StrictModel):
    """Job of a cycle, and what it has used of the budget."""

    began_at: float
    seconds: float = 0.0
    """Time that it has trained; 0 until it ends."""
    tokens: int = 0
    """Tokens that it has trained on; 0 until it ends."""


class Cycle(StrictModel):
    """Where a learner stands. Times are unix seconds."""

    state: State = "collecting"
    number: int = 0
    """Number of the cycle, from 1; while it collects, of the last one."""
    entered_at: float
    """When it came into this state."""
    began_at: float | None = None
    """When the cycle began."""
    data_until: float = 0.0
    """Up to where the cycle sees the traffic: what came later is for the next one."""
    dataset: str | None = None
    """"name@n"."""
    job: str | None = None
    candidate: str | None = None
    """"name@n" that the job published."""
    canary: str | None = None
    paused: bool = False
    asked: bool = False
    """Somebody wants a cycle now, whatever the trigger says."""
    until: float = 0.0
    """Up to where earlier cycles have seen the traffic."""
    not_before: float = 0.0
    """When it looks again after a fault."""
    faults: int = 0
    """Failed cycles in a row."""
    refused: int = 0
    """Candidates in a row that were rejected or rolled back."""
    outcome: Outcome | None = None
    """Of the last cycle."""
    promoted: str | None = None
    """The last version that it promoted."""
    datasets: tuple[str, ...] = ()
    """Data sets of earlier cycles that have taught a promoted version, oldest first."""
    jobs: tuple[JobTime, ...] = ()
    """Jobs of the last 24 hours, and the last one."""


class NewEvent(StrictModel):
    """An event that is about to be kept."""

    kind: EventKind
    detail: str
    """What happened, in a sentence."""
    cycle: int
    by: str = "controller"
    """Id of the API key of the person who did it, or "controller"."""
    evidence: dict[str, Any] = Field(default_factory=dict)


class Event(NewEvent):
    """What happened to a learner."""

    id: str
    at: float
    """Unix seconds."""


class Learner(StrictModel):
    """A learner as it is kept."""

    id: str
    """Its own, also if another one of the same name follows."""
    policy: LearnerPolicy
    revision: int
    """Number of the policy, which every change raises."""
    turn: int
    """Number of the last write, which every one raises."""
    cycle: Cycle
    key_id: str = ""
    """Id of the API key that it belongs to; empty: there were no keys."""
    everybodys: bool = False
    """True if it learns from the traffic of all keys: an administrator made it."""
    created_at: float
    changed_at: float
    """When the policy was changed."""

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def state(self) -> str:
        """State as it is told: a paused learner is paused, wherever its cycle stands."""
        return "paused" if self.cycle.paused else self.cycle.state

    @property
    def traffic_of(self) -> str | None:
        """API key whose traffic it learns from; None: everybody's."""
        return None if self.everybodys else self.key_id

    @property
    def cycle_key(self) -> str:
        """Name of its present cycle: whatever is made under it is made once."""
        return f"{self.id}-{self.cycle.number}"

    @property
    def canary_id(self) -> str:
        """Id of the canary of its present cycle."""
        return f"canary_{ulid_of(self.cycle_key, int((self.cycle.began_at or 0) * 1000))}"
