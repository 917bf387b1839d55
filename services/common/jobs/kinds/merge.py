"""Several adapters into one: its request. docs/guides/adapters.md has the formulas."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from services.common.adapters.names import AdapterRef
from services.common.errors import InvalidRequest
from services.common.jobs.base import PublishingJob
from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, both, either, given, has, if_any, left_out
from services.common.validation.strict_models import SentModel

MergeMethod: TypeAlias = Literal["weighted", "svd", "ties", "dare_linear", "dare_ties"]
SPARSE_METHODS: frozenset[MergeMethod] = frozenset(["ties", "dare_linear", "dare_ties"])
"""Methods that work on the entries of the delta matrices and keep a part of them."""
MAX_SOURCES = 16


class MergeSource(SentModel):
    """One parent of a merge."""

    adapter: AdapterRef
    """"name@n", or "name" for its current version."""
    weight: float = Field(1.0, ge=-100, le=100, json_schema_extra={"not": {"const": 0}})
    """Factor of its delta. Negative: what the adapter does is taken away. Not 0."""

    @model_validator(mode="after")
    def _counts(self) -> MergeSource:
        if self.weight == 0:
            raise ValueError(f"the weight of {self.adapter} is 0, so it would change nothing: leave it out")
        return self


class MergeSettings(SentModel):
    """Versions to merge, and the method."""

    sources: list[MergeSource] = Field(min_length=1, max_length=MAX_SOURCES)
    method: MergeMethod = "weighted"
    rank: int | None = Field(None, ge=1, le=256)
    """Rank of the result. weighted may leave it out: then nothing is cut off, and the rank is the sum of the parents'.
    All other methods need it."""
    density: float | None = Field(None, gt=0, le=1)
    """Share of the entries of each parent's delta that is kept: the largest (ties), or random ones (dare_*)."""
    scale: float = Field(1.0, gt=0, le=100)
    """The merged delta times this; lambda in the TIES paper."""

    json_rules: ClassVar[Rules] = (
        either(
            both(if_any(method="weighted"), left_out("density")),
            both(has(method="svd"), given("rank"), left_out("density")),
            both(has(method={"enum": sorted(SPARSE_METHODS)}), given("rank", "density")),
        ),
    )

    @model_validator(mode="after")
    def _goes_together(self) -> MergeSettings:
        if self.rank is None and self.method != "weighted":
            raise contradiction(f"method {self.method} needs a rank: its exact result has full rank", "rank")
        if self.method in SPARSE_METHODS and self.density is None:
            raise contradiction(f"method {self.method} needs a density, e.g. 0.2 for ties or 0.5 for dare", "density")
        if self.method not in SPARSE_METHODS and self.density is not None:
            raise contradiction(f"method {self.method} keeps every entry: leave density out, or use ties", "density")
        refs = [source.adapter for source in self.sources]
        for ref in refs:
            if refs.count(ref) > 1:
                raise contradiction(f"{ref} is among the sources more than once: add its weights up", "sources")
        return self


class MergeJob(PublishingJob, MergeSettings):
    """Merges versions of adapters of the same base model into a new version."""

    kind: Literal["merge"] = "merge"
    attach: bool = False
    """Attach the new version to the base model's name when the job succeeds."""


def exact_sum_over(needed: int, highest: int) -> InvalidRequest:
    """The refusal of a merge without a rank whose exact result no engine could serve."""
    return InvalidRequest(
        f"the exact sum of these adapters has rank {needed}, but the engine serves adapters up to rank {highest} "
        "(TEMPER_MAX_LORA_RANK): give rank, and the nearest adapter of that rank is made",
        param="rank",
    )
