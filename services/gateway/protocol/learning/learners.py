"""Bodies of /v1/learners."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict

from services.common.storage.names import NAME_SCHEMA
from services.gateway.protocol.fields.listing import Listing
from services.learning.datasets.build import DatasetReport
from services.learning.datasets.spec import DatasetSpec, Split
from services.learning.learners.policy import LearnerPolicy
from services.learning.learners.record import Event, Learner, Outcome, State

LearnerPath = Annotated[str, Path(json_schema_extra=dict(NAME_SCHEMA))]


class LearnerObject(BaseModel):
    """A learner: its policy, and where it stands. Times are unix seconds."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Name of the learner."""
    object: Literal["learner"] = "learner"
    policy: LearnerPolicy
    revision: int
    """Number of the policy, which every change raises."""
    state: State | Literal["paused"]
    entered_at: float
    """When it came into its state."""
    cycle: int
    """Number of its cycle; while it collects, of the last one."""
    dataset: str | None
    """Data set of that cycle, "name@n"."""
    job: str | None
    candidate: str | None
    """Version that the job published, "name@n"."""
    canary: str | None
    outcome: Outcome | None
    """How the last cycle ended."""
    promoted: str | None
    """The last version that it promoted."""
    refused: int
    """Candidates in a row that were rejected or rolled back."""
    faults: int
    """Cycles in a row that failed."""
    not_before: float | None
    """When it looks again after a failed cycle."""
    key_id: str | None
    """API key that it belongs to; null: there were no keys."""
    created_at: float
    changed_at: float
    """When the policy was changed."""

    @classmethod
    def of(cls, learner: Learner) -> LearnerObject:
        """A learner as the API tells it."""
        cycle = learner.cycle
        return cls(
            id=learner.name,
            policy=learner.policy,
            revision=learner.revision,
            state=learner.state,
            entered_at=cycle.entered_at,
            cycle=cycle.number,
            dataset=cycle.dataset,
            job=cycle.job,
            candidate=cycle.candidate,
            canary=cycle.canary,
            outcome=cycle.outcome,
            promoted=cycle.promoted,
            refused=cycle.refused,
            faults=cycle.faults,
            not_before=cycle.not_before or None,
            key_id=learner.key_id or None,
            created_at=learner.created_at,
            changed_at=learner.changed_at,
        )


class LearnerList(Listing):
    """Learners by name."""

    object: Literal["list"] = "list"
    data: list[LearnerObject]
    has_more: bool


class DeletedLearner(BaseModel):
    """What was removed."""

    id: str
    object: Literal["learner"] = "learner"
    deleted: Literal[True] = True


class LearnerEvents(BaseModel):
    """What happened, newest first, each with its evidence."""

    object: Literal["list"] = "list"
    data: list[Event]
    has_more: bool


class LearnerPlan(BaseModel):
    """What a cycle would do if it began now. Nothing is done."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["learner.plan"] = "learner.plan"
    learner: str
    begins: bool
    """Whether it would begin by itself."""
    why: str
    waiting: int
    """New rows."""
    data: DatasetSpec
    """Declaration of its data set."""
    rows: dict[Split, int]
    report: DatasetReport
    examples: int
    """Examples that the job would learn from."""
    job: dict[str, Any]
    """Body of the job."""
    suites: list[str]
    """Suites of the gate, "name@n"."""
    canary_share: float | None
    """Share of the traffic that a candidate would get; null: it is promoted at once."""
    problems: list[str]
    """Reasons for which the cycle would fail."""
