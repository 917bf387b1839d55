"""Suites in the object store: immutable versions, numbered by conditional writes, below `suites/`
(services/common/storage/versioned_objects.py has the layout)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence

from services.common.errors import NotFound
from services.common.evaluation.suites.manifest import (
    SuiteManifest,
    SuiteOrigin,
    content_digest,
    item_lines,
    weights_and_groups,
)
from services.common.evaluation.suites.names import SuiteVersion, check_suite_name
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.storage.object_store import ObjectStore
from services.common.storage.record_versions import SUITE
from services.common.storage.versioned_objects import VersionedObjects, pieces_of

_ITEMS = "items"


class SuiteStore:
    """Versions of suites. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore) -> None:
        self._versions = VersionedObjects(store, "suite", "suites/", "suite.json", SUITE)

    # Reading.

    def newest(self) -> list[SuiteVersion]:
        """The newest version of each suite, by name."""
        return [SuiteVersion(name, number) for name, number in self._versions.newest()]

    def versions(self, name: str) -> list[int]:
        """Numbers of a suite's versions in ascending order; empty if there is no such suite."""
        return self._versions.numbers(check_suite_name(name))

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
            raise self._versions.missing(name, number)
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
        lines = self._versions.lines(manifest.name, manifest.version, _ITEMS, manifest.pieces, start, limit)
        return [SuiteItem.model_validate_json(line) for line in lines]

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
        number = self._versions.claim(name)
        for index, (_, data) in enumerate(pieces):
            self._versions.write_piece(name, number, _ITEMS, index, data)
        worth = weights_and_groups(items)
        manifest = SuiteManifest(
            name=name,
            version=number,
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
        self._versions.publish(name, number, manifest.model_dump(mode="json"))
        return manifest

    def erase(self, mark: str, first: Callable[[str, Collection[str]], object]) -> dict[str, int]:
        """Takes the items with a mark of erasure out of every suite that was made of a data set: the version goes, and
        of a newest one what is left becomes a new version. Returns how many items of which version. May be repeated.

        Args:
            first: called with the suite's name and the ids of such items before they go, for what else has them.
        """
        gone = {}
        for name, newest in self._versions.newest():
            for number in self.versions(name):
                manifest = self._read(SuiteVersion(name, number))
                if manifest is None or manifest.origin is None or manifest.origin.dataset is None:
                    continue
                items = self.items(manifest)
                left = [item for item in items if mark not in item.marks]
                if len(left) == len(items):
                    continue
                first(name, [item.id for item in items if mark in item.marks and item.id is not None])
                if left and number == newest:
                    self.create(name, manifest.settings, left, origin=manifest.origin, key_id=manifest.key_id)
                self.delete(manifest.ref)
                gone[str(manifest.ref)] = len(items) - len(left)
        return gone

    def delete(self, version: SuiteVersion) -> None:
        """Removes a version. Raises NotFound: there is none."""
        manifest = self.get(version.name, version.version)
        self._versions.unpublish(version.name, version.version)
        for index in range(len(manifest.pieces)):
            self._versions.delete_piece(version.name, version.version, _ITEMS, index)

    def _read(self, version: SuiteVersion) -> SuiteManifest | None:
        record = self._versions.read(version.name, version.version)
        with SUITE.reading(f"suite {version}"):
            return None if record is None else SuiteManifest.model_validate_json(json.dumps(record))
