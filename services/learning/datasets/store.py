"""Data sets in the object store: immutable versions below `datasets/`, numbered by conditional writes
(services/common/storage/versioned_objects.py has the layout).

One thing changes a version: a user is erased. Then rows of that user are taken out, and the manifest says when and how
many; everything else stays as it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import NotFound, Unavailable
from services.common.storage.names import version_number
from services.common.storage.object_store import ObjectStore
from services.common.storage.record_versions import DATASET
from services.common.storage.versioned_objects import Piece, VersionedObjects, pieces_of
from services.common.validation.strict_models import StrictModel
from services.learning.datasets.build import Built, DatasetReport
from services.learning.datasets.outliers import DIGITS
from services.learning.datasets.rows import Row
from services.learning.datasets.spec import SPLITS, DatasetSpec, Split, check_dataset_name

_LOOKED_AT = 5


class Recut(StrictModel):
    """Rows that were taken out because their user was erased."""

    at: float
    """Unix seconds."""
    rows: int


class DatasetManifest(StrictModel):
    """A version of a data set."""

    name: str
    version: int
    digest: str
    """SHA-256 over declaration and rows."""
    spec: DatasetSpec
    report: DatasetReport
    rows: dict[Split, int]
    pieces: dict[Split, tuple[Piece, ...]]
    files: Mapping[str, str]
    """SHA-256 of each file that it was made of."""
    recuts: tuple[Recut, ...] = ()
    made_for: str = ""
    """See NewDataset."""
    key_id: str = ""
    """Id of the API key that the name belongs to; empty: there were no keys."""
    created_at: float
    """Unix seconds."""

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def total(self) -> int:
        """Rows of all splits."""
        return sum(self.rows.values())


@dataclass(frozen=True, slots=True)
class NewDataset:
    """Declaration of a version that is about to be written."""

    name: str
    spec: DatasetSpec
    key_id: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    made_for: str = ""
    """Whose it is: at most one version is made for it. Empty: nobody's."""


def parse_dataset_ref(text: str) -> tuple[str, int | None]:
    """Splits "name" or "name@n" into name and version (None: the newest). Raises InvalidRequest."""
    name, at, number = text.partition("@")
    check_dataset_name(name)
    return name, version_number(number, "dataset") if at else None


class DatasetStore:
    """Versions of data sets. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore) -> None:
        self._versions = VersionedObjects(store, "dataset", "datasets/", "dataset.json", DATASET)

    def newest(self) -> list[tuple[str, int]]:
        """Name and number of the newest version of each data set, by name."""
        return self._versions.newest()

    def versions(self, name: str) -> list[int]:
        """Numbers of a data set's versions in ascending order."""
        return self._versions.numbers(check_dataset_name(name))

    def get(self, name: str, number: int | None = None) -> DatasetManifest:
        """Manifest of a version; None: the newest. Raises NotFound."""
        if number is None:
            numbers = self.versions(name)
            if not numbers:
                raise NotFound(f"dataset {name!r} does not exist", param="dataset")
            number = numbers[-1]
        record = self._versions.read(name, number)
        if record is None:
            raise self._versions.missing(name, number)
        with DATASET.reading(f"dataset {name}@{number}"):
            return DatasetManifest.model_validate_json(json.dumps(record))

    def key_id(self, name: str, number: int) -> str | None:
        """API key that a manifest of whatever release says it belongs to; None: it does not say so here."""
        return self._versions.key_id(name, number)

    def rows(self, manifest: DatasetManifest, split: Split, start: int = 0, limit: int | None = None) -> Iterator[Row]:
        """Rows of a split in their order. Raises NotFound: the version was deleted meanwhile."""
        lines, pieces = _lines(split, manifest), manifest.pieces[split]
        for line in self._versions.lines(manifest.name, manifest.version, lines, pieces, start, limit):
            yield Row.model_validate_json(line)

    def create(self, new: NewDataset, built: Built) -> DatasetManifest:
        """Writes a version, or returns the newest one if that has the same rows."""
        cut = {split: pieces_of(map(_line, built.rows[split])) for split in SPLITS}
        pieces = {split: tuple(piece for piece, _ in parts) for split, parts in cut.items()}
        digest = _digest(new.spec, pieces)
        numbers = self.versions(new.name)
        newest = self.get(new.name, numbers[-1]) if numbers else None
        if newest is not None and newest.digest == digest and not newest.recuts:
            return newest
        number = self._versions.claim(new.name, new.made_for)
        if new.made_for and (made := self.made_for(new)) is not None:
            return made  # somebody who was taken for dead has done it
        manifest = DatasetManifest(
            name=new.name,
            version=number,
            digest=digest,
            spec=new.spec,
            report=built.report,
            rows={split: len(built.rows[split]) for split in SPLITS},
            pieces=pieces,
            files=new.files,
            made_for=new.made_for,
            key_id=new.key_id,
            created_at=time.time(),
        )
        for split, parts in cut.items():
            for index, (_, data) in enumerate(parts):
                self._versions.write_piece(new.name, number, _lines(split, manifest), index, data)
        self._versions.publish(new.name, number, manifest.model_dump(mode="json"))
        return manifest

    def made_for(self, new: NewDataset) -> DatasetManifest | None:
        """The version that was made before for the same purpose, if it is among the newest."""
        for number in reversed(self.versions(new.name)[-_LOOKED_AT:]):
            manifest = self.get(new.name, number)
            if manifest.made_for == new.made_for:
                return manifest
        return None

    def delete(self, manifest: DatasetManifest) -> None:
        """Removes a version; its number is not used again."""
        self._versions.unpublish(manifest.name, manifest.version)
        self._versions.keep_pieces(manifest.name, manifest.version, ())

    def erase(self, mark: str) -> dict[str, int]:
        """Takes the rows that a mark of erasure means out of every data set; returns how many of which version."""
        gone = {}
        for name, _ in self.newest():
            for number in self.versions(name):
                if (count := self.cut_out(name, number, frozenset((mark,)))) > 0:
                    gone[f"{name}@{number}"] = count
        return gone

    def cut_out(self, name: str, number: int, marks: frozenset[str]) -> int:
        """Takes the rows that one of the marks means out of a version; returns how many.

        Raises:
            Unavailable: somebody else is at it.
        """
        with self._versions.locked(name, number):
            manifest = self.get(name, number)
            # Pieces of an earlier cut, which died before it could remove them.
            self._versions.keep_pieces(name, number, [_lines(split, manifest) for split in SPLITS])
            kept = {
                split: [row for row in self.rows(manifest, split) if row.marks.isdisjoint(marks)] for split in SPLITS
            }
            count = manifest.total - sum(map(len, kept.values()))
            if count:
                self._recut(manifest, kept, count)
            return count

    def _recut(self, manifest: DatasetManifest, kept: Mapping[Split, Sequence[Row]], count: int) -> None:
        """Writes a version again with the rows that are left."""
        cut = {split: pieces_of(map(_line, rows)) for split, rows in kept.items()}
        pieces = {split: tuple(piece for piece, _ in parts) for split, parts in cut.items()}
        left = {user[:DIGITS] for rows in kept.values() for row in rows for user in row.users}
        told = {
            "top_users": tuple(one for one in manifest.report.top_users if one.user in left),
            "outliers": tuple(one for one in manifest.report.outliers if one.user in left),
        }
        changed = manifest.model_copy(
            update={
                "digest": _digest(manifest.spec, pieces),
                "pieces": pieces,
                "rows": {split: len(rows) for split, rows in kept.items()},
                "report": manifest.report.model_copy(update=told),
                "recuts": (*manifest.recuts, Recut(at=time.time(), rows=count)),
            }
        )
        name, number = manifest.name, manifest.version
        for split, parts in cut.items():
            for index, (_, data) in enumerate(parts):
                self._versions.write_piece(name, number, _lines(split, changed), index, data)
        before = manifest.model_dump(mode="json")
        if not self._versions.republish(name, number, changed.model_dump(mode="json"), before=before):
            raise Unavailable(f"dataset {name}@{number} was changed meanwhile; retry")
        self._versions.keep_pieces(name, number, [_lines(split, changed) for split in SPLITS])


def _lines(split: Split, manifest: DatasetManifest) -> str:
    """Name of a split's pieces: other ones each time that rows were taken out."""
    return f"{split}.{len(manifest.recuts)}"


def _line(row: Row) -> bytes:
    return row.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _digest(spec: DatasetSpec, pieces: Mapping[Split, Sequence[Piece]]) -> str:
    said = [spec.model_dump_json(), *(piece.sha256 for split in SPLITS for piece in pieces[split])]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
