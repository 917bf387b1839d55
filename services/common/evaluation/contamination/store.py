"""Hashes of each job's training data in the object store, from which the overlap with a version's whole lineage follows
without the data.

Layout, under one bucket:
    adapters/{name}/training-hashes/{job id}/prompts-{000000}  64-bit little-endian hashes in the order of the data
    adapters/{name}/training-hashes/{job id}/grams-{000000}
    adapters/{name}/training-hashes/{job id}/record.json       written last: what the job learnt from, and all that
                                                               came before it

They stay when a version is removed, since others may have come of it, and go with the adapter.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field

from services.common.adapters.names import AdapterVersion, parse_adapter_version
from services.common.adapters.registry import AdapterRegistry, Manifest
from services.common.errors import ModelNotFound
from services.common.evaluation.contamination.hashes import TextHasher, prompt_hashes
from services.common.evaluation.contamination.texts import ReadText
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import TRAINING_HASHES
from services.common.validation.strict_models import StrictModel

PIECE_HASHES = 2**19
"""Hashes of a piece: 4 MiB."""
Series: TypeAlias = Literal["prompts", "grams"]


class DataSource(StrictModel):
    """A job whose training data are known."""

    adapter: str
    job_id: str

    @property
    def prefix(self) -> str:
        return f"adapters/{self.adapter}/training-hashes/{self.job_id}/"


class TrainingRecord(StrictModel):
    """What a job learnt from, as hashes, and what the versions that it came of had learnt from."""

    kind: str
    documents: int
    pieces: dict[Series, int]
    """Pieces of each series of hashes."""
    before: tuple[DataSource, ...] = ()
    unknown: tuple[str, ...] = Field(default=(), max_length=10_000)
    """Versions before it, "name@n", of whose training nothing is known."""


@dataclass(frozen=True, slots=True)
class TrainingLineage:
    """All that a version and those that it came of were trained on, the base model's own training apart."""

    sources: tuple[DataSource, ...]
    unknown: tuple[str, ...]
    """Versions, "name@n", of whose training data nothing is known: uploaded, of a session, or of an earlier release."""


class TrainingHashes:
    """Hashes of training data. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._store: ObjectStore = registry.store

    def write(
        self,
        source: DataSource,
        kind: str,
        parents: Sequence[AdapterVersion],
        texts: Iterable[ReadText],
        interrupt: Callable[[], None] = lambda: None,
    ) -> TrainingRecord:
        """Writes what a job learns from. May be repeated.

        Args:
            parents: versions that the job starts from.
            interrupt: called for each text; may raise.
        """
        hasher = TextHasher()
        prompts, grams = _Pieces(self._store, source, "prompts"), _Pieces(self._store, source, "grams")
        documents = 0
        for text in texts:
            interrupt()
            documents += 1
            prompts.add(sorted(prompt_hashes(text)))
            grams.add(hasher.grams(text))
        before = self.lineage(*parents)
        record = TrainingRecord(
            kind=kind,
            documents=documents,
            pieces={"prompts": prompts.end(), "grams": grams.end()},
            before=before.sources,
            unknown=before.unknown,
        )
        data = json.dumps(TRAINING_HASHES.stamped(record.model_dump(mode="json"))).encode()
        self._store.put(f"{source.prefix}record.json", data)
        return record

    def begun(self, source: DataSource) -> TrainingLineage | None:
        """What a job and all that it came of were trained on; None: it has not written what it learns from."""
        record = self._record(source)
        return None if record is None else TrainingLineage((source, *record.before), record.unknown)

    def forget(self, source: DataSource) -> None:
        """Removes what a job wrote that has ended, unless a version came of it."""
        if self._registry.published_any(source.adapter, source.job_id):
            return
        self._store.delete(f"{source.prefix}record.json")
        self._store.delete_prefix(source.prefix)

    def lineage(self, *versions: AdapterVersion) -> TrainingLineage:
        """What these versions were trained on, each source once."""
        sources: dict[DataSource, None] = {}
        unknown: dict[str, None] = {}
        waiting, seen = list(reversed(versions)), set[AdapterVersion]()
        while waiting:
            version = waiting.pop()
            if version in seen:
                continue
            seen.add(version)
            manifest = self._manifest(version)
            source = None if manifest is None or manifest.job_id is None else _source(manifest, manifest.job_id)
            record = None if source is None else self._record(source)
            if source is None or record is None:
                unknown[str(version)] = None
                waiting += [] if manifest is None else _parents(manifest)
            else:
                sources |= dict.fromkeys((source, *record.before))
                unknown |= dict.fromkeys(record.unknown)
        return TrainingLineage(tuple(sources), tuple(unknown))

    def missing(self, sources: Iterable[DataSource]) -> list[DataSource]:
        """Sources whose hashes went with their adapter."""
        return [source for source in sources if self._record(source) is None]

    def read(self, sources: Iterable[DataSource], series: Series) -> Iterator[array[int]]:
        """Hashes of one series, piece by piece. Sources that are gone are passed over."""
        for source in sources:
            record = self._record(source)
            for number in range(0 if record is None else record.pieces[series]):
                yield _decoded(self._store.get(_piece_key(source, series, number)).data)

    def _manifest(self, version: AdapterVersion) -> Manifest | None:
        try:
            return self._registry.manifest(version)
        except ModelNotFound:
            return None

    def _record(self, source: DataSource) -> TrainingRecord | None:
        key = f"{source.prefix}record.json"
        try:
            found = json.loads(self._store.get(key).data)
        except ObjectNotFound:
            return None
        with TRAINING_HASHES.reading(key):
            return TrainingRecord.model_validate_json(json.dumps(TRAINING_HASHES.unstamped(found, key)))


class _Pieces:
    """Writes hashes in pieces, each without repetitions."""

    def __init__(self, store: ObjectStore, source: DataSource, series: Series) -> None:
        self._store = store
        self._source = source
        self._series: Series = series
        self._waiting: dict[int, None] = {}
        self._written = 0

    def add(self, hashes: Iterable[int]) -> None:
        self._waiting |= dict.fromkeys(hashes)
        if len(self._waiting) >= PIECE_HASHES:
            self._write()

    def end(self) -> int:
        """Writes what is left; returns how many pieces there are."""
        if self._waiting:
            self._write()
        return self._written

    def _write(self) -> None:
        self._store.put(_piece_key(self._source, self._series, self._written), _encoded(self._waiting))
        self._waiting = {}
        self._written += 1


def _source(manifest: Manifest, job_id: str) -> DataSource:
    return DataSource(adapter=manifest.name, job_id=job_id)


def _parents(manifest: Manifest) -> list[AdapterVersion]:
    named = [] if manifest.parent is None else [manifest.parent]
    merged = () if manifest.lineage is None else manifest.lineage.parents
    return [parse_adapter_version(ref) for ref in (*named, *(parent.version for parent in merged))]


def _piece_key(source: DataSource, series: Series, number: int) -> str:
    return f"{source.prefix}{series}-{number:06d}"


def _encoded(hashes: Iterable[int]) -> bytes:
    found = array("Q", hashes)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _decoded(data: bytes) -> array[int]:
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found
