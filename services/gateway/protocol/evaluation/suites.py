"""Bodies of /v1/eval/suites."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.evaluation.gates.plan import DISCORDANT
from services.common.evaluation.statistics.power import smallest_gain
from services.common.evaluation.suites.manifest import SuiteManifest, SuiteOrigin
from services.common.evaluation.suites.names import SuiteName
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.split import TrainingSplit
from services.common.jobs.fields.refs import DatasetRef
from services.common.storage.names import REF_SCHEMA
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, exactly_one, given, only_with
from services.gateway.protocol.fields.listing import Listing

SuitePath = Annotated[str, Path(json_schema_extra=dict(REF_SCHEMA))]
""""name" or "name@n" in a path; what is wrong with it is said by parse_suite_ref."""


class SuiteRequest(SuiteSettings):
    """POST /v1/eval/suites: a new version of a suite, out of lines of JSON or the held-out rows of a data set."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    json_rules: ClassVar[Rules] = (exactly_one("jsonl", "dataset"), only_with("split", given("jsonl")))

    name: SuiteName
    jsonl: str | None = Field(None, min_length=1)
    """The items, a JSON object a line: `prompt` or `messages`, `expected` (the right answer, or several), and where
    they apply `choices`, `expected_tool_calls`, `json_schema`, `id`, `group`, `weight`, `tools`, `metadata`. With
    `split`, the rows of a training file, as jobs of kind sft learn from."""
    split: TrainingSplit | None = None
    """Takes a part of a training file as the suite, whole groups at a time. The items' ids name the lines."""
    dataset: DatasetRef | None = None
    """Data set, "name@n" or "name" for its newest version, whose held-out rows become the items: one a prompt, with
    the answer that was corrected or rated best. Those that the scorer cannot score are left out."""

    @model_validator(mode="after")
    def _one_source(self) -> SuiteRequest:
        if (self.jsonl is None) == (self.dataset is None):
            raise contradiction("the items come from jsonl or from a dataset: give one of them", "jsonl")
        if self.split is not None and self.jsonl is None:
            raise contradiction("a data set has its own split: leave this one out", "split")
        return self

    @property
    def settings(self) -> SuiteSettings:
        """What the request says of all items."""
        return SuiteSettings(**{field: getattr(self, field) for field in SuiteSettings.model_fields})


class SuiteObject(BaseModel):
    """A version of a suite, which never changes."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """"name@version"."""
    object: Literal["eval.suite"] = "eval.suite"
    name: str
    version: int
    digest: str
    """SHA-256 over settings and items: equal suites have equal digests."""
    settings: SuiteSettings
    items: int
    clusters: int
    """Groups, and items without one."""
    effective_items: float
    """Independent items of equal weight that the suite is worth at least, by its weights and groups."""
    smallest_gain: float | None
    """Smallest gain in accuracy that a comparison on this suite finds with power 0.8 at alpha 0.05, were a fifth of its
    items answered differently; null: none."""
    origin: SuiteOrigin | None
    """Training file or data set that it was taken from."""
    created_at: float
    """Unix seconds."""

    @classmethod
    def of(cls, manifest: SuiteManifest) -> SuiteObject:
        """A version as the API tells it."""
        gain = smallest_gain(manifest.effective_items, DISCORDANT)
        return cls(
            id=str(manifest.ref),
            name=manifest.name,
            version=manifest.version,
            digest=manifest.digest,
            settings=manifest.settings,
            items=manifest.items,
            clusters=manifest.clusters,
            effective_items=manifest.effective_items,
            smallest_gain=None if gain is None else round(gain, 4),
            origin=manifest.origin,
            created_at=manifest.created_at,
        )


class SuiteList(Listing):
    """Versions of suites."""

    object: Literal["list"] = "list"
    data: list[SuiteObject]
    has_more: bool


class SuiteItemObject(SuiteItem):
    """An item of a suite."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    index: int
    """Place in the suite, from 0."""


class SuiteItemList(BaseModel):
    """A page of a suite's items, in their order."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    suite: str
    """"name@version"."""
    data: list[SuiteItemObject]
    total: int
    """All items of the version."""
    has_more: bool


class DeletedSuite(BaseModel):
    """What was removed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """As it was asked for."""
    object: Literal["eval.suite"] = "eval.suite"
    deleted: Literal[True] = True
    versions: list[int]
