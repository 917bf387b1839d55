"""Removing old versions of adapters: which ones, and how, while others publish, attach and roll back.

A removal says what it is about to do (`removing-…`), looks at every pointer, and only then deletes manifest.json, by
which the version ceases to exist; its files follow. Whoever moves a pointer looks for `removing-…` after the move
(AdapterRegistry), so a pointer never ends on a version that is gone. `removed` stays: numbers are never used twice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.common.adapters.keys import (
    ATTACHED,
    job_key,
    manifest_key,
    removed_key,
    removing_prefix,
    version_prefix,
    versions_prefix,
)
from services.common.adapters.manifest import Manifest
from services.common.adapters.names import AdapterVersion, parse_adapter_ref
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, TemperError
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import POINTER

_REMOVAL_SECONDS = 60.0
"""A removal that has not come to the manifest by then gives up."""
_STALE_SECONDS = 600.0
"""Age of a `removing-…` whose process must have died."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Rules for keeping versions of an adapter: a version that either rule keeps, stays."""

    keep: int | None = None
    """Number of newest versions that are kept."""
    days: float | None = None
    """Versions that are younger."""

    def __post_init__(self) -> None:
        if self.keep is None and self.days is None:
            raise InvalidRequest("say what to keep: keep (a number of versions), days, or both", param="keep")
        if self.keep is not None and self.keep < 1:
            raise InvalidRequest(f"keep must be at least 1, got {self.keep}", param="keep")
        if self.days is not None and not 0 <= self.days < float("inf"):
            raise InvalidRequest(f"days must be a number of at least 0, got {self.days}", param="days")

    def reason(self, age_rank: int, manifest: Manifest, now: float) -> str | None:
        """Reason why a version stays; None: it may go. ``age_rank``: 0 for the newest."""
        if self.keep is not None and age_rank < self.keep:
            return f"among the newest {self.keep}"
        if self.days is not None and now - manifest.created_at < self.days * 86400:
            return f"younger than {self.days:g} days"
        return None


@dataclass(slots=True)
class Pruned:
    """Result of a policy on an adapter, done or only planned."""

    removed: list[Manifest] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    """Version → why it stays."""

    @property
    def freed_bytes(self) -> int:
        return sum(manifest.size_bytes for manifest in self.removed)


def prune(
    registry: AdapterRegistry,
    name: str,
    policy: RetentionPolicy,
    *,
    in_use: Collection[AdapterVersion] = (),
    dry_run: bool = False,
) -> Pruned:
    """Removes the versions of one adapter that the policy does not keep. Blocking.

    Args:
        in_use: versions that unfinished jobs need.

    Raises:
        ModelNotFound: there is no such adapter.
        Unavailable: the object store is away; what was removed until then is removed as a whole.
    """
    registry.current(name)
    pruned = Pruned()
    manifests = registry.versions(name)
    now = time.time()
    for age_rank, manifest in enumerate(reversed(manifests)):
        version = manifest.ref
        reason = policy.reason(age_rank, manifest, now) or _pointed_at(registry, version)
        if reason is None and version in in_use:
            reason = "an unfinished job needs it"
        if reason is None and not dry_run:
            reason = _remove(registry, manifest)
        if reason is None:
            pruned.removed.append(manifest)
        else:
            pruned.kept[version.version] = reason
    if not dry_run:
        _sweep(registry.store, name)
    return pruned


def _pointed_at(registry: AdapterRegistry, version: AdapterVersion) -> str | None:
    """Pointer that holds a version, of all models that use this bucket, or that it may yet get."""
    if registry.current(version.name) == version:
        return "current"
    if version.version > registry.newest(version.name):
        return "a candidate"
    for key in registry.store.list(ATTACHED):
        try:
            pointer = POINTER.unstamped(json.loads(registry.store.get(key).data), key)
        except ObjectNotFound:  # nobody ever deletes these
            return f"{key} is listed and cannot be read"
        ref = pointer.get("adapter")
        if ref is not None and parse_adapter_ref(str(ref)) == (version.name, version.version):
            return "attached"
    return None


def _remove(registry: AdapterRegistry, manifest: Manifest) -> str | None:
    """Removes a version; returns why not, if it has become current or attached since."""
    version, store = manifest.ref, registry.store
    began = time.monotonic()
    intent = removing_prefix(version) + uuid.uuid4().hex
    store.put(intent, json.dumps({"at": time.time()}).encode())
    try:
        reason = _pointed_at(registry, version)
        if reason is None and time.monotonic() - began > _REMOVAL_SECONDS:
            reason = "the object store was too slow to remove it safely"
        if reason is not None:
            store.delete(intent)
            return reason
        if manifest.publication is not None:
            # First: a repeated end of the job must never fill this number again.
            store.delete(job_key(version.name, manifest.publication))
        store.put(removed_key(version), json.dumps({"at": time.time(), "digest": manifest.digest}).encode())
        store.delete(manifest_key(version))
    except TemperError:
        _forget_intent(store, intent)
        raise
    _delete_rest(store, version, store.list(version_prefix(version)))
    return None


def _forget_intent(store: ObjectStore, intent: str) -> None:
    try:
        store.delete(intent)
    except TemperError:
        return  # the store is away; the next prune removes it when it is stale


def _sweep(store: ObjectStore, name: str) -> None:
    """Ends removals that died between the manifest and the last file, and forgets intentions of dead processes."""
    prefix = versions_prefix(name)
    by_version: dict[int, list[str]] = {}
    for key in store.list(prefix):
        by_version.setdefault(int(key[len(prefix) :].split("/")[0]), []).append(key)
    for number, keys in by_version.items():
        version = AdapterVersion(name, number)
        if removed_key(version) in keys and manifest_key(version) not in keys:
            _delete_rest(store, version, keys)
            continue
        for key in keys:
            if key.startswith(removing_prefix(version)) and _is_stale(store, key):
                store.delete(key)


def _is_stale(store: ObjectStore, intent: str) -> bool:
    try:
        return time.time() - float(json.loads(store.get(intent).data)["at"]) > _STALE_SECONDS
    except ObjectNotFound:
        return False


def _delete_rest(store: ObjectStore, version: AdapterVersion, keys: Sequence[str]) -> None:
    for key in keys:
        if key != removed_key(version):
            store.delete(key)
