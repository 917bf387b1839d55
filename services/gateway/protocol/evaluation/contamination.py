"""Bodies of /v1/eval/suites/{suite}/contamination."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.common.adapters.names import AdapterVersion
from services.common.evaluation.contamination.report import Contamination
from services.common.evaluation.suites.manifest import SuiteManifest


class ContaminatedItemObject(BaseModel):
    """An item that occurs in training data."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    index: int
    """Place in the suite, from 0."""
    id: str
    exact: bool
    """Its whole prompt was trained on."""
    share: float
    """Share of its runs of 13 words that occur in the training data; 0 if it is shorter."""


class ContaminationObject(BaseModel):
    """What of a suite a version was trained on, with all that it came of."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["eval.contamination"] = "eval.contamination"
    suite: str
    """"name@version"."""
    adapter: str
    """"name@version"."""
    items: int
    contaminated: int
    """Items of which something occurs in the training data."""
    exact: int
    """Those whose whole prompt does."""
    jobs: int
    """Jobs whose training data were compared."""
    unknown: list[str]
    """Versions and jobs of the lineage of whose training data nothing is known: versions that were uploaded, came of a
    session or of an earlier release, and jobs whose adapter was deleted."""
    data: list[ContaminatedItemObject]
    """The first of the contaminated items, as many as asked for."""

    @classmethod
    def of(cls, suite: SuiteManifest, version: AdapterVersion, found: Contamination, limit: int) -> ContaminationObject:
        """A comparison as the API tells it."""
        return cls(
            suite=str(suite.ref),
            adapter=str(version),
            items=found.items,
            contaminated=len(found.contaminated),
            exact=found.exact,
            jobs=found.jobs,
            unknown=list(found.unknown),
            data=[
                ContaminatedItemObject(
                    index=one.index, id=one.id, exact=one.overlap.exact, share=round(one.overlap.share, 4)
                )
                for one in found.contaminated[:limit]
            ],
        )
