"""Makes versions of data sets: builds the rows, writes them, and leaves out who is erased meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from services.common.errors import InvalidRequest, NotFound
from services.common.evaluation.contamination.overlap import SuiteOverlap
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.spec import SuiteItem
from services.common.evaluation.suites.store import SuiteStore
from services.learning.datasets.build import Built, DatasetBuilder, DatasetReport
from services.learning.datasets.rows import Row
from services.learning.datasets.spec import DatasetSpec
from services.learning.datasets.store import DatasetManifest, DatasetStore, NewDataset, parse_dataset_ref
from services.learning.feedback.record import FeedbackRecord
from services.learning.request_log.log import RequestLog

_SLACK_SECONDS = 60.0
"""Difference that clocks of gateways may have."""


class DatasetMaker:
    """Makes data sets of what the stores have. Blocking; Unavailable when a store is away."""

    def __init__(self, store: DatasetStore, log: RequestLog, suites: SuiteStore) -> None:
        self.store = store
        self.log = log
        self._suites = suites

    def build(
        self,
        spec: DatasetSpec,
        opinions: Sequence[FeedbackRecord],
        files: Mapping[str, Iterable[Mapping[str, Any]]],
        owner: str | None,
    ) -> Built:
        """The rows, and what became of all that was looked at.

        Args:
            opinions: all feedback that the caller may use.
            files: examples by the id of their file.
            owner: API key whose requests may be used; None: everybody's.

        Raises:
            NotFound: a data set whose rows are mixed in, or a suite that they are to be apart from, is not there.
        """
        others = [chain.from_iterable(map(self._training_rows, one.datasets)) for one in spec.mix]
        suites = [SuiteOverlap(self._items(ref)) for ref in spec.apart_from]
        return DatasetBuilder(spec, self.log, owner).build(opinions, files, others, suites)

    def _training_rows(self, ref: str) -> Iterator[Row]:
        """Raises NotFound."""
        return self.store.rows(self.store.get(*parse_dataset_ref(ref)), "train")

    def _items(self, ref: str) -> list[SuiteItem]:
        """Raises NotFound."""
        try:
            return self._suites.items(self._suites.get(*parse_suite_ref(ref)))
        except NotFound as error:
            raise NotFound(error.message, param="apart_from") from error

    def make(
        self,
        new: NewDataset,
        opinions: Sequence[FeedbackRecord],
        files: Mapping[str, Iterable[Mapping[str, Any]]],
        owner: str | None,
    ) -> tuple[DatasetManifest, Sequence[str]]:
        """A new version, or the newest one if that has the same rows; and the ids of the feedback that is in it.

        Raises:
            InvalidRequest: there are no rows.
        """
        if new.made_for and (made := self.store.made_for(new)) is not None:
            return made, self.build(new.spec, opinions, files, owner).opinions
        began = time.time()
        built = self.build(new.spec, opinions, files, owner)
        if not any(built.rows.values()):
            raise InvalidRequest(f"no row fulfils all conditions: {_looked_at(built.report)}", param="filter")
        manifest = self.store.create(new, built)
        # Who erases a user leaves a mark, and cuts what is published; here it is the other way round.
        erased = frozenset(self.log.erased_since(began - _SLACK_SECONDS))
        if erased and self.store.cut_out(manifest.name, manifest.version, erased):
            manifest = self.store.get(manifest.name, manifest.version)
        return manifest, built.opinions


def _looked_at(report: DatasetReport) -> str:
    told = {name: value for name, value in report.model_dump().items() if isinstance(value, int) and value}
    return (
        ", ".join(f"{name} {value}" for name, value in told.items()) or "there is neither feedback nor a logged request"
    )
