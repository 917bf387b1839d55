"""Contamination of a suite by a version's lineage: what is contaminated, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.adapters.names import AdapterVersion
from services.common.evaluation.contamination.overlap import ItemOverlap, SuiteOverlap
from services.common.evaluation.contamination.store import TrainingHashes, TrainingLineage
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.store import SuiteStore


@dataclass(frozen=True, slots=True)
class ContaminatedItem:
    """An item that the training data hold, in whole or in part."""

    index: int
    id: str
    overlap: ItemOverlap


@dataclass(frozen=True, slots=True)
class Contamination:
    """Contamination of a suite by all that a version was trained on, the base model's own training apart."""

    items: int
    contaminated: tuple[ContaminatedItem, ...]
    jobs: int
    """Jobs of the lineage whose training data were compared."""
    unknown: tuple[str, ...]
    """Versions and jobs of the lineage of whose training data nothing is known."""

    @property
    def exact(self) -> int:
        """Items whose whole prompt was trained on."""
        return sum(item.overlap.exact for item in self.contaminated)

    @property
    def clean(self) -> bool:
        """Nothing is contaminated, and everything was looked at."""
        return not self.contaminated and not self.unknown


def contamination(
    suites: SuiteStore,
    hashes: TrainingHashes,
    suite: SuiteManifest,
    version: AdapterVersion,
    interrupt: Callable[[], None] = lambda: None,
) -> Contamination:
    """Compares a suite with the training data of a version and of all that it came of. Blocking: seconds for 100,000
    training documents.

    Args:
        interrupt: called now and then; may raise.

    Raises:
        NotFound: the suite was deleted meanwhile.
    """
    return contamination_by(suites, hashes, suite, hashes.lineage(version), interrupt)


def contamination_by(
    suites: SuiteStore,
    hashes: TrainingHashes,
    suite: SuiteManifest,
    lineage: TrainingLineage,
    interrupt: Callable[[], None] = lambda: None,
) -> Contamination:
    """The same of training data by themselves: also those of a job that has not published."""
    items = suites.items(suite)
    gone = hashes.missing(lineage.sources)
    known = [source for source in lineage.sources if source not in gone]
    found = SuiteOverlap(items).find(hashes.read(known, "prompts"), hashes.read(known, "grams"), interrupt)
    return Contamination(
        items=len(items),
        contaminated=tuple(
            ContaminatedItem(index, item.id, overlap)
            for index, (item, overlap) in enumerate(zip(items, found, strict=True))
            if overlap.contaminated
        ),
        jobs=len(known),
        unknown=(*lineage.unknown, *(f"job {source.job_id} of {source.adapter}" for source in gone)),
    )
