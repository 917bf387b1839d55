"""Bodies of /v1/datasets."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict

from services.common.storage.names import REF_SCHEMA
from services.gateway.protocol.fields.listing import Listing
from services.gateway.protocol.learning.erasure import ErasedJobs
from services.learning.datasets.build import DatasetReport
from services.learning.datasets.rows import Row
from services.learning.datasets.spec import DatasetName, DatasetSpec, Split
from services.learning.datasets.store import DatasetManifest, Recut

DatasetPath = Annotated[str, Path(json_schema_extra=dict(REF_SCHEMA))]
""""name" or "name@n" in a path."""


class DatasetRequest(DatasetSpec):
    """POST /v1/datasets: a new version of a data set."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: DatasetName
    dry_run: bool = False
    """Nothing is written: the answer has the report alone."""

    @property
    def spec(self) -> DatasetSpec:
        """What the request says of the rows."""
        return DatasetSpec(**{field: getattr(self, field) for field in DatasetSpec.model_fields})


class DatasetObject(BaseModel):
    """A version of a data set, which does not change but where a user is erased."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str | None
    """"name@version"; null: a dry run."""
    object: Literal["dataset"] = "dataset"
    name: str
    version: int | None
    digest: str | None
    """SHA-256 over declaration and rows."""
    spec: DatasetSpec
    report: DatasetReport
    rows: dict[Split, int]
    files: dict[str, str]
    """SHA-256 of each file that it was made of."""
    recuts: list[Recut]
    """Rows that were taken out later, because their user was erased."""
    created_at: float | None

    @classmethod
    def of(cls, manifest: DatasetManifest) -> DatasetObject:
        """A version as the API tells it."""
        return cls(
            id=manifest.ref,
            name=manifest.name,
            version=manifest.version,
            digest=manifest.digest,
            spec=manifest.spec,
            report=manifest.report,
            rows=manifest.rows,
            files=dict(manifest.files),
            recuts=list(manifest.recuts),
            created_at=manifest.created_at,
        )


class DatasetList(Listing):
    """Versions of data sets."""

    object: Literal["list"] = "list"
    data: list[DatasetObject]
    has_more: bool


class DatasetRows(BaseModel):
    """A page of a split's rows, in their order."""

    object: Literal["list"] = "list"
    dataset: str
    split: Split
    data: list[Row]
    total: int
    has_more: bool


class DeletedDataset(BaseModel):
    """What was removed."""

    id: str
    object: Literal["dataset"] = "dataset"
    deleted: Literal[True] = True
    versions: list[int]


class ErasedUser(BaseModel):
    """What was erased of a user."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["erased_user"] = "erased_user"
    feedback: int
    requests: int
    """Logged requests that were found; those that a gateway is still to write are left out as they come."""
    datasets: dict[str, int]
    """Rows that were taken out, by version."""
    suites: dict[str, int]
    """Items that were taken out of suites made of data sets, by the version that they were in, which is gone."""
    evaluations: dict[str, int]
    """Answers to such items whose text was taken out of evaluations, by run. Scores stay."""
    jobs: ErasedJobs
