"""What a data set is made of: where its rows come from, which of them it takes, and how they are split."""

from __future__ import annotations

from operator import not_
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from services.common.jobs.fields.refs import DatasetRef, SuiteRef
from services.common.storage.names import NAME_SCHEMA, check_name, field_check
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, either, given, has, if_any, true_only_with
from services.common.validation.strict_models import SentModel
from services.learning.feedback.record import Source

Split = Literal["train", "validation", "held_out"]
MAX_APART = 32
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")
_Text = Annotated[str, Field(min_length=1, max_length=256)]


def _nothing(value: object) -> bool:
    """True for a list that earlier releases did not have: what is made without it has the digest that it had."""
    return value == []


def check_dataset_name(name: str) -> str:
    """Returns the name if a data set may have it. Raises InvalidRequest."""
    return check_name(name, "dataset")


DatasetName = Annotated[str, field_check(check_dataset_name), WithJsonSchema({"type": "string", **NAME_SCHEMA})]


class DatasetFilter(SentModel):
    """Conditions that every row fulfils; a condition that is not given holds for all."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    since: float | None = Field(None, ge=0)
    """Unix seconds at which the request ended, at the earliest."""
    until: float | None = Field(None, ge=0)
    """Unix seconds before which it ended."""
    keys: list[_Text] | None = Field(None, min_length=1, max_length=1000)
    """Ids of the API keys that sent it."""
    versions: list[_Text] | None = Field(None, min_length=1, max_length=1000)
    """Versions that answered: "name@n", "name" for all of an adapter, "base" for the model without adapter. Several
    adapters together are found as answers name them only, by "a@3*0.7+b@1"."""
    labels: list[_Text] | None = Field(None, min_length=1, max_length=1000)
    """Labels of which the feedback has one."""
    sources: list[Source] | None = Field(None, min_length=1)
    """Sources of the feedback that counts."""
    said_since: float | None = Field(None, ge=0)
    """Unix seconds at which the feedback was given or changed, at the earliest; where there is none, at which the
    request ended."""
    said_until: float | None = Field(None, ge=0)
    """Unix seconds before which it was."""
    metadata: dict[str, str] | None = Field(None, min_length=1, max_length=16)
    """Metadata that the request has, among others."""
    min_rating: float | None = Field(None, ge=-1, le=1)
    """Rating, at least. A row without feedback has none, and fulfils neither bound."""
    max_rating: float | None = Field(None, ge=-1, le=1)


class DatasetSplit(SentModel):
    """How rows are split. Rows of one user or session stay together, and in later versions they stay where they are."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    by: Literal["user", "session", "request"] = "user"
    """A row without user goes by its session, one without that by its request."""
    validation: float = Field(0.1, ge=0, lt=1)
    held_out: float = Field(0.1, ge=0, lt=1)
    seed: int = Field(0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _leaves_something(self) -> DatasetSplit:
        if self.validation + self.held_out >= 1:
            raise contradiction("validation and held_out together leave nothing to train on: less than 1", "held_out")
        return self


class MixedIn(SentModel):
    """Training rows of other data sets, which are mixed into these: a replay of earlier ones, or an anchor against
    forgetting."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    datasets: list[DatasetRef] = Field(min_length=1, max_length=50)
    """Their names: "name@n", or "name" for the newest version."""
    share: float = Field(gt=0, lt=1)
    """Share of all training rows that they are, unless they have fewer."""


class DatasetSpec(SentModel):
    """Declaration of a data set."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    json_rules: ClassVar[Rules] = (
        either(if_any(feedback=True), has(logged=True), given("files")),
        true_only_with("trajectories", if_any(feedback=True)),
    )

    feedback: bool = True
    """Answers that somebody said something of, with what was said. Their requests come from the request log."""
    logged: bool = False
    """Logged answers of which nobody said anything."""
    trajectories: bool = Field(False, exclude_if=not_)
    """A session that was rated, as a whole or by answers in it, is one row: a trajectory, with the rating of an answer
    as the reward of its turn."""
    files: list[_Text] | None = Field(None, min_length=1, max_length=100)
    """Ids of files (/v1/files) with examples, as jobs of kind sft, dpo or kto take them."""
    filter: DatasetFilter = DatasetFilter()
    """Applies to feedback and logged requests; rows of files are all taken."""
    split: DatasetSplit = DatasetSplit()
    mix: list[MixedIn] = Field(default_factory=list, max_length=8, exclude_if=_nothing)
    """Rows of other data sets among the training rows. Which ones follows from the seed of the split."""
    apart_from: list[SuiteRef] = Field(default_factory=list, max_length=MAX_APART, exclude_if=_nothing)
    """Suites whose items are not to be taught: training rows that ask what an item asks, or have 13 words in a row of
    one, are left out."""
    max_user_share: float = Field(1.0, gt=0, le=1)
    """Share of the rows that what one user said may be: against one who says too much. The newest are kept."""
    max_rows: int = Field(100_000, ge=1, le=1_000_000)
    """Most rows, of which the newest are kept."""

    @model_validator(mode="after")
    def _leaves_room(self) -> DatasetSpec:
        if sum(one.share for one in self.mix) >= 1:
            raise contradiction("the shares of mix leave nothing for the rows: less than 1", "mix")
        return self

    @model_validator(mode="after")
    def _of_something(self) -> DatasetSpec:
        if not self.feedback and not self.logged and self.files is None:
            raise contradiction("rows come from feedback, logged or files: give one", "feedback")
        if self.trajectories and not self.feedback:
            raise contradiction("trajectories are sessions that were rated: leave feedback true", "trajectories")
        return self
