"""Manifest of a suite's version: its settings, its origin, and the pieces that its items are stored in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from services.common.evaluation.statistics.scores import Scores
from services.common.evaluation.suites.names import SuiteVersion
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.split import TrainingSplit
from services.common.storage.versioned_objects import Piece
from services.common.validation.strict_models import StrictModel


class SuiteOrigin(StrictModel):
    """Training file or data set that a suite was taken from."""

    sha256: str
    """Of the file's text, or the data set's digest."""
    rows: int
    """Rows of the file, or held-out ones of the data set."""
    split: TrainingSplit | None = None
    """Split of the file; null: the data set has its own."""
    dataset: str | None = None
    """The data set, "name@n"."""


class SuiteManifest(StrictModel):
    """A version of a suite. It never changes."""

    name: str
    version: int
    digest: str
    """SHA-256 over the settings and all items: equal suites have equal digests."""
    settings: SuiteSettings
    items: int
    clusters: int
    """Groups, and items without one."""
    effective_items: float
    """Independent items of equal weight that the suite is worth at least: what is not known before a run is how alike
    the items of a group are answered, and here they count as one."""
    origin: SuiteOrigin | None = None
    pieces: tuple[Piece, ...]
    key_id: str = ""
    """Id of the API key that the suite's name belongs to; empty: there were no keys."""
    created_at: float
    """Unix seconds."""

    @property
    def ref(self) -> SuiteVersion:
        return SuiteVersion(self.name, self.version)


def item_lines(items: Iterable[SuiteItem]) -> Iterator[bytes]:
    """Items as lines of JSON, without what is as it is by default."""
    for item in items:
        yield item.model_dump_json(exclude_defaults=True).encode() + b"\n"


def content_digest(settings: SuiteSettings, pieces: Sequence[Piece]) -> str:
    """SHA-256 over settings and items."""
    text = "\n".join([settings.model_dump_json(), *(piece.sha256 for piece in pieces)])
    return hashlib.sha256(text.encode()).hexdigest()


def weights_and_groups(items: Sequence[SuiteItem]) -> Scores:
    """Weights and groups of the items, as statistics take them, with scores of 0."""
    groups = [item.group for item in items]
    return Scores([0.0] * len(items), [item.weight for item in items], groups)
