"""Body of /v1/evaluations/compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.common.evaluation.runs.records import Bounds, PairResult
from services.common.evaluation.runs.side_by_side import Compared, Entry


class _Said(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ComparedEntry(_Said):
    """One target of one run: a column of the table."""

    label: str
    evaluation: str
    target: str
    created_at: float
    """Unix seconds."""


class ComparedScore(_Said):
    """Score of one entry on one suite: a cell of the table."""

    suite: str
    """"name@version"."""
    better: str
    """Whether a "higher" or a "lower" score is better."""
    entry: int
    """Place among the entries."""
    mean: float
    interval: Bounds | None
    items: int
    invalid: int
    with_first: PairResult | None
    """Comparison of the first entry with this one; null: this is the first, or they did not answer the same items with
    the same sampling."""


class ComparisonObject(_Said):
    """Up to eight targets side by side."""

    object: Literal["evaluation.comparison"] = "evaluation.comparison"
    entries: list[ComparedEntry]
    data: list[ComparedScore]
    """Suite by suite."""

    @classmethod
    def of(cls, entries: Sequence[Entry], found: Sequence[Compared]) -> ComparisonObject:
        """A comparison as the API tells it."""
        return cls(
            entries=[
                ComparedEntry(
                    label=one.label,
                    evaluation=one.record.id,
                    target=one.record.targets[one.target].name,
                    created_at=one.record.created_at,
                )
                for one in entries
            ],
            data=[
                ComparedScore(
                    suite=one.suite.suite,
                    better=one.suite.better,
                    entry=one.entry,
                    mean=one.summary.mean,
                    interval=one.summary.interval,
                    items=one.summary.items,
                    invalid=one.summary.invalid,
                    with_first=one.with_first,
                )
                for one in found
            ],
        )
