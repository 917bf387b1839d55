"""Suites in the object store: immutable versions, numbered by conditional writes.

Layout, under one bucket:
    suites/{name}/{n:08d}/claim           who took this number (If-None-Match); stays when the version is deleted:
                                          a number never means something else
    suites/{name}/{n:08d}/items-{000000}  the items in pieces, JSONL
    suites/{name}/{n:08d}/suite.json      the manifest, written last (If-None-Match) and removed first: the version
                                          exists while this does
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Sequence

from services.common.errors import NotFound, Unavailable
from services.common.evaluation.suites.manifest import (
    SuiteManifest,
    SuiteOrigin,
    content_digest,
    item_lines,
    pieces_of,
    weights_and_groups,
)
from services.common.evaluation.suites.names import SuiteVersion, check_suite_name
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.common.storage.record_versions import SUITE

_ROOT = "suites/"
_MANIFEST = "suite.json"
_RACES = 64
"""Numbers that others may take while one is looked for."""


class SuiteStore:
    """Versions of suites. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    # Reading.

    def newest(self) -> list[SuiteVersion]:
        """The newest version of each suite, by name."""
        numbers: dict[str, int] = {}
        for version in self._existing(_ROOT):
            numbers[version.name] = max(version.version, numbers.get(version.name, 0))
        return [SuiteVersion(name, number) for name, number in sorted(numbers.items())]

    def versions(self, name: str) -> list[int]:
        """Numbers of a suite's versions in ascending order; empty if there is no such suite."""
        return sorted(version.version for version in self._existing(_suite_prefix(check_suite_name(name))))

    def get(self, name: str, number: int | None = None) -> SuiteManifest:
        """Manifest of a version.

        Args:
            number: None: the newest.

        Raises:
            NotFound: there is no such suite or version.
        """
        if number is None:
            numbers = self.versions(name)
            if not numbers:
                raise NotFound(f"suite {name!r} does not exist", param="suite")
            number = numbers[-1]
        version = SuiteVersion(name, number)
        manifest = self._read(version)
        if manifest is None:
            raise _missing(version)
        return manifest

    def items(self, manifest: SuiteManifest, start: int = 0, limit: int | None = None) -> list[SuiteItem]:
        """Items of a version in their order.

        Args:
            start: index of the first one.
            limit: most of them; None: all that follow.

        Raises:
            NotFound: the version was deleted meanwhile.
            Unavailable: what is stored is not what was written.
        """
        end = manifest.items if limit is None else min(manifest.items, start + limit)
        found: list[SuiteItem] = []
        first = 0
        for number, piece in enumerate(manifest.pieces):
            if first < end and first + piece.items > start:
                lines = self._piece(manifest, number).splitlines()
                found += map(SuiteItem.model_validate_json, lines[max(0, start - first) : end - first])
            first += piece.items
        return found

    # Writing.

    def create(
        self,
        name: str,
        settings: SuiteSettings,
        items: Sequence[SuiteItem],
        *,
        origin: SuiteOrigin | None = None,
        key_id: str = "",
    ) -> SuiteManifest:
        """Makes a new version of ``name``, or returns the newest one if that has the same content.

        Concurrent writers get distinct numbers.

        Args:
            items: at least one; each with its id.
            key_id: of the API key that the name belongs to.
        """
        check_suite_name(name)
        pieces = pieces_of(item_lines(items))
        digest = content_digest(settings, [piece for piece, _ in pieces])
        numbers = self.versions(name)
        newest = self._read(SuiteVersion(name, numbers[-1])) if numbers else None
        if newest is not None and newest.digest == digest:
            return newest
        version = self._claim(name)
        for number, (_, data) in enumerate(pieces):
            self._store.put(_piece_key(version, number), data)
        worth = weights_and_groups(items)
        manifest = SuiteManifest(
            name=name,
            version=version.version,
            digest=digest,
            settings=settings,
            items=len(items),
            clusters=len(worth.clusters),
            effective_items=worth.effective_clusters,
            origin=origin,
            pieces=tuple(piece for piece, _ in pieces),
            key_id=key_id,
            created_at=time.time(),
        )
        record = json.dumps(SUITE.stamped(manifest.model_dump(mode="json"))).encode()
        self._store.put(f"{_prefix(version)}{_MANIFEST}", record, if_absent=True)
        return manifest

    def delete(self, version: SuiteVersion) -> None:
        """Removes a version. Raises NotFound: there is none."""
        manifest = self.get(version.name, version.version)
        self._store.delete(f"{_prefix(version)}{_MANIFEST}")
        for number in range(len(manifest.pieces)):
            self._store.delete(_piece_key(version, number))

    # Parts.

    def _claim(self, name: str) -> SuiteVersion:
        """The next free number, which is this writer's from here on."""
        taken = [int(part) for part in self._store.list_dirs(_suite_prefix(name)) if part.isdigit()]
        claim = uuid.uuid4().hex.encode()
        first = max(taken, default=0) + 1
        for number in range(first, first + _RACES):
            version = SuiteVersion(name, number)
            try:
                self._store.put(f"{_prefix(version)}claim", claim, if_absent=True)
            except PreconditionFailed:
                continue
            return version
        raise Unavailable(f"too many others make versions of suite {name!r} at once; retry")

    def _existing(self, prefix: str) -> list[SuiteVersion]:
        """Versions whose manifests lie below a prefix."""
        found = []
        for key in self._store.list(prefix):
            _, name, number, *rest = key.split("/")
            if rest == [_MANIFEST]:
                found.append(SuiteVersion(name, int(number)))
        return found

    def _read(self, version: SuiteVersion) -> SuiteManifest | None:
        try:
            record = json.loads(self._store.get(f"{_prefix(version)}{_MANIFEST}").data)
        except ObjectNotFound:
            return None
        return SuiteManifest.model_validate_json(json.dumps(SUITE.unstamped(record, f"suite {version}")))

    def _piece(self, manifest: SuiteManifest, number: int) -> bytes:
        try:
            data = self._store.get(_piece_key(manifest.ref, number)).data
        except ObjectNotFound as error:
            raise _missing(manifest.ref) from error
        if hashlib.sha256(data).hexdigest() != manifest.pieces[number].sha256:
            raise Unavailable(f"suite {manifest.ref}: its items in the object store are not those that were written")
        return data


def _suite_prefix(name: str) -> str:
    return f"{_ROOT}{name}/"


def _prefix(version: SuiteVersion) -> str:
    return f"{_suite_prefix(version.name)}{version.version:08d}/"


def _piece_key(version: SuiteVersion, number: int) -> str:
    return f"{_prefix(version)}items-{number:06d}"


def _missing(version: SuiteVersion) -> NotFound:
    return NotFound(f"suite version {version} does not exist, or does not any more", param="suite")
