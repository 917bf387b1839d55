"""`dataset`: the rows of a data set in the place of a job's own data."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from services.common.adapters.manifest import DatasetOrigin
from services.common.jobs.fields.refs import DatasetRef
from services.common.validation.errors import contradiction
from services.common.validation.strict_models import SentModel, absent


class OfDataset(SentModel):
    """Fields of a job that can learn from a data set. The gateway writes its rows into the job, which goes into the
    queue with data of its own."""

    dataset: DatasetRef | None = Field(None, exclude_if=absent)
    """Data set to learn from, in the place of data in the job: "name@n", or "name" for its newest version."""
    dataset_digest: SkipJsonSchema[str | None] = Field(None, exclude_if=absent)
    """Digest of the data set, as the gateway read it."""

    own_data: ClassVar[str]
    """Field that the rows are written into."""

    @property
    def unread(self) -> bool:
        """True until the gateway has written the rows in."""
        return self.dataset is not None and self.dataset_digest is None

    @property
    def learnt(self) -> DatasetOrigin | None:
        """The data set that the job's data are of."""
        if self.dataset is None or self.dataset_digest is None:
            return None
        return DatasetOrigin(version=self.dataset, digest=self.dataset_digest)

    @model_validator(mode="after")
    def _digest_of_something(self) -> OfDataset:
        if self.dataset_digest is not None and self.dataset is None:
            raise contradiction("dataset_digest is written by the gateway: leave it out", "dataset_digest")
        return self
