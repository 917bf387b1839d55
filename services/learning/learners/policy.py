"""Policy of a learner: what it learns from, when, how, and what a version must show before others get it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from services.common.adapters.names import AdapterName
from services.common.jobs import JOBS, PublishIf
from services.common.jobs.fields.refs import DatasetRef
from services.common.storage.names import NAME_SCHEMA, check_name, field_check
from services.common.validation.errors import contradiction, problem
from services.common.validation.json_rules import Rules, at_least_one, if_any, left_out
from services.common.validation.strict_models import SentModel, check_finite
from services.learning.canaries.policy import CanaryPolicy
from services.learning.datasets.spec import MAX_APART, DatasetSpec, MixedIn

Method = Literal["sft", "dpo", "kto", "grpo"]
DAY: Final = 86400.0
_OF_THE_LEARNER: Final = frozenset(
    ("kind", "adapter", "dataset", "dataset_digest", "publish_if", "attach", "attach_if", "candidate", "metadata")
)
"""Fields of a job that the rest of the policy says."""
_CLOCK: Final = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
_ANYTHING: Final = "d@1"


def check_learner_name(name: str) -> str:
    """Returns the name if a learner may have it. Raises InvalidRequest."""
    return check_name(name, "learner")


LearnerName = Annotated[str, field_check(check_learner_name), WithJsonSchema({"type": "string", **NAME_SCHEMA})]


class Replay(SentModel):
    """Rows of this learner's earlier data sets, those that taught a promoted version, among the training rows."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    share: float = Field(gt=0, lt=1)
    """Share of the training rows."""
    datasets: int = Field(5, ge=1, le=20)
    """How many of the last ones."""


class Anchor(SentModel):
    """Rows of a data set that is always learnt along, against forgetting."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    dataset: DatasetRef
    """"name@n", or "name" for its newest version at each cycle."""
    share: float = Field(gt=0, lt=1)
    """Share of the training rows."""


class Window(SentModel):
    """Part of the day in which cycles begin, in UTC; over midnight if it ends before it begins."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    begin: str = Field(pattern=_CLOCK)
    """"22:00"."""
    end: str = Field(pattern=_CLOCK)

    def holds(self, at: float) -> bool:
        """True if a unix time is in it."""
        now = datetime.fromtimestamp(at, UTC).strftime("%H:%M")
        if self.begin <= self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end


class Trigger(SentModel):
    """What begins a cycle: new feedback, time, or both together."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    json_rules: ClassVar[Rules] = (at_least_one("min_rows", "every_seconds"),)

    min_rows: int | None = Field(100, ge=1, le=1_000_000)
    """New opinions, at least, since the last cycle's."""
    every_seconds: float | None = Field(None, ge=1, le=90 * DAY)
    """Time, at least, since the last cycle began."""
    window: Window | None = None

    @model_validator(mode="after")
    def _of_something(self) -> Trigger:
        if self.min_rows is None and self.every_seconds is None:
            raise contradiction("nothing would begin a cycle: give min_rows, every_seconds or both", "min_rows")
        return self


class Budget(SentModel):
    """Most that a learner may use in any 24 hours; a cycle that would begin beyond it waits. A job that trains on more
    tokens than are left is cancelled."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    jobs: int | None = Field(24, ge=1, le=1000)
    """Jobs that begin."""
    training_seconds: float | None = Field(None, gt=0, le=1000 * DAY)
    """Time from the beginning to the end of its jobs, together."""
    training_tokens: int | None = Field(None, ge=1, le=10**15)
    """Tokens that its jobs train on, together, as they count them (`num_tokens`)."""
    cycle_tokens: int | None = Field(None, ge=1, le=10**15)
    """Tokens that the job of one cycle trains on."""


class LearnerPolicy(SentModel):
    """Policy of a learner. A change of it holds from the next step on."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    json_rules: ClassVar[Rules] = (if_any(data=if_any(filter=left_out("said_since", "said_until"))),)

    name: LearnerName
    """Name of the learner, and of its data sets."""
    adapter: AdapterName
    """Adapter that gets new versions."""
    method: Method
    """Kind of its jobs."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further fields of such a job: `learning_rate`, `epochs`, `lora`, `beta`, `reference`, …"""
    data: DatasetSpec = DatasetSpec()
    """Data set of each cycle. Of feedback and logged requests it has those that came since the last cycle's."""
    replay: Replay | None = None
    anchor: Anchor | None = None
    trigger: Trigger = Trigger()
    budget: Budget = Budget()
    gate: PublishIf | None = None
    """Conditions for a candidate: `publish_if` of its job. Names of suites mean their newest version at each cycle."""
    canary: CanaryPolicy | None = None
    """Rules by which a candidate that has passed the gate gets a share of the traffic. null: it is promoted at once."""
    attach: bool = True
    """Answer for the base model's name with what is promoted. With a canary: if the adapter's current version does."""
    stop_after: int = Field(3, ge=1, le=1000)
    """Candidates in a row that are rejected or rolled back, after which the learner stops until it is resumed."""

    @model_validator(mode="after")
    def _few_enough_suites(self) -> LearnerPolicy:
        if len(self._apart_from()) > MAX_APART:
            raise contradiction(f"the gate and data.apart_from name more than {MAX_APART} suites", "data")
        return self

    @model_validator(mode="after")
    def _shares_leave_something(self) -> LearnerPolicy:
        mixed = [part.share for part in (self.replay, self.anchor, *self.data.mix) if part is not None]
        if sum(mixed) >= 1:
            raise contradiction(
                "replay, anchor and data.mix leave nothing for new rows: less than 1 together", "replay"
            )
        wanted = self.data.filter
        if wanted.said_since is not None or wanted.said_until is not None:
            raise contradiction(
                "which feedback is new in a cycle is for the learner to say: leave it out",
                "data.filter.said_since" if wanted.said_since is not None else "data.filter.said_until",
            )
        return self

    @model_validator(mode="after")
    def _a_job_has_the_settings(self) -> LearnerPolicy:
        check_finite(self.settings)
        if taken := sorted(self.settings.keys() & _OF_THE_LEARNER):
            raise contradiction(
                f"no settings of a learner's job: {taken[0]} is said elsewhere in the policy", "settings"
            )
        body = self.job(_ANYTHING)
        try:
            JOBS[self.method].model_validate(body)
        except ValidationError as error:
            reason = problem(error, JOBS[self.method], body)
            field = "gate" if re.match(r"publish_if\b", reason) else "settings"
            raise contradiction(f"no {field} of a learner's job of kind {self.method}: {reason}", field) from error
        return self

    def job(self, dataset: str, *, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Body of a cycle's job.

        Args:
            dataset: "name@n".
        """
        gate = {} if self.gate is None else {"publish_if": self.gate.model_dump(mode="json", exclude_unset=True)}
        published = {"attach": self.attach} if self.canary is None else {"attach": False, "candidate": True}
        named = {"adapter": self.adapter, "dataset": dataset, "metadata": dict(metadata or {})}
        return {**self.settings, **named, **published, **gate}

    def spec(self, since: float, until: float, earlier: tuple[str, ...]) -> DatasetSpec:
        """Declaration of a cycle's data set.

        Args:
            since, until: unix seconds between which what it has was said or asked.
            earlier: this learner's data sets, "name@n", oldest first.
        """
        wanted = self.data.filter
        times = {"said_since": since, "said_until": until}
        mix = list(self.data.mix)
        if self.replay is not None and earlier:
            mix.append(MixedIn(datasets=list(earlier[-self.replay.datasets :]), share=self.replay.share))
        if self.anchor is not None:
            mix.append(MixedIn(datasets=[self.anchor.dataset], share=self.anchor.share))
        changed = {"filter": wanted.model_copy(update=times), "mix": mix, "apart_from": self._apart_from()}
        return self.data.model_copy(update=changed)

    def _apart_from(self) -> list[str]:
        """Suites that are not taught: those of the declaration, and those of the gate. It does not decide on a suite of
        which something was taught, so one user who asks what an item asks would hold up every cycle."""
        judges: list[str] = []
        if self.gate is not None and not self.gate.allow_contaminated:
            judges = [*(one.suite for one in self.gate.gain), *(one.suite for one in self.gate.no_loss)]
        return list(dict.fromkeys((*self.data.apart_from, *judges)))
