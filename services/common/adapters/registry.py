"""Adapter versions in the object store: immutable objects, a pointer per adapter, and what is attached to the base.

Layout, under one bucket:
    adapters/{name}/versions/{n:08d}/claim              who took this number (If-None-Match)
    adapters/{name}/versions/{n:08d}/adapter_*          the PEFT files (If-None-Match); of a drafter drafter.*
    adapters/{name}/versions/{n:08d}/manifest.json      written last (If-None-Match): the version exists from here on
    adapters/{name}/versions/{n:08d}/receipt.json       what its job made it of, signed; written before the manifest
    adapters/{name}/versions/{n:08d}/canaries/{id}.json the canary by which it became current, with its evidence
    adapters/{name}/versions/{n:08d}/removing-{id}      somebody removes it (services/common/adapters/retention.py)
    adapters/{name}/versions/{n:08d}/removed            all that is left of a version that was removed
    adapters/{name}/jobs/{job id}                       which number a job publishes as (If-None-Match)
    adapters/{name}/CURRENT                             {"version": n, "newest": m, "moves": […]}, moved by If-Match
    attached/{served model name}                        {"adapter": "name@n"} or {"adapter": null}
    deleted/{name}                                      {"newest": m}: a number is never used twice, also after delete
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from services.common.adapters.evidence import GateEvidence
from services.common.adapters.keys import (
    canary_key,
    current_key,
    job_key,
    manifest_key,
    receipt_key,
    version_prefix,
    versions_prefix,
)
from services.common.adapters.manifest import CONFIG as CONFIG
from services.common.adapters.manifest import WEIGHTS as WEIGHTS
from services.common.adapters.manifest import (
    DatasetOrigin,
    FileEntry,
    Lineage,
    files_digest,
    kind_of,
    parsed_config,
    publication,
    stated_rank,
)
from services.common.adapters.manifest import Manifest as Manifest
from services.common.adapters.names import AdapterVersion, check_adapter_name
from services.common.adapters.pointers import RACES, AdapterPointers
from services.common.adapters.pointers import Pointers as Pointers
from services.common.adapters.receipts import Receipt
from services.common.errors import AdapterRejected, Conflict, InvalidRequest, ModelNotFound, NotFound, Unavailable
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.common.storage.record_versions import MANIFEST, POINTER, PassOver, passing_over


class AdapterRegistry(AdapterPointers):
    """Adapter versions and pointers. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore, served_model_name: str) -> None:
        super().__init__(store, served_model_name)
        self._served_model_name = served_model_name

    # Reading.

    def names(self) -> list[str]:
        """Adapters that have a current version, sorted."""
        return sorted(self.pointers().current)

    def versions(self, name: str, pass_over: PassOver | None = None) -> list[Manifest]:
        """Complete versions in ascending order; empty if there is no such adapter.

        Args:
            pass_over: told of those that a later release wrote. None: they are an error.

        Raises:
            NewerSchema: there is one of a later release.
        """
        prefix = versions_prefix(check_adapter_name(name))
        found = []
        for key in self._store.list(prefix):
            if key.endswith("/manifest.json"):
                version = AdapterVersion(name, int(key[len(prefix) :].split("/")[0]))
                with passing_over(pass_over, str(version), None):
                    found.append(self._read_manifest(version))
        return sorted((m for m in found if m is not None), key=lambda m: m.version)

    def manifest(self, version: AdapterVersion) -> Manifest:
        """Raises ModelNotFound if there is no such complete version."""
        manifest = self._read_manifest(version)
        if manifest is None:
            raise ModelNotFound(f"adapter version {version} does not exist", param="adapter")
        return manifest

    def config(self, version: AdapterVersion) -> dict[str, Any]:
        """Contents of a version's adapter_config.json.

        Raises:
            ModelNotFound: no such version.
            AdapterRejected: it is missing or no JSON object.
        """
        try:
            data = self._store.get(f"{version_prefix(version)}{CONFIG}").data
        except ObjectNotFound as error:
            self.manifest(version)
            raise AdapterRejected(f"{version}: {CONFIG} is missing from the object store") from error
        return parsed_config(data)

    def receipt(self, version: AdapterVersion) -> bytes:
        """Contents of a version's receipt.

        Raises:
            ModelNotFound: no such version.
            NotFound: it has none: no job made it, or an earlier release did.
        """
        self.manifest(version)
        try:
            return self._store.get(receipt_key(version)).data
        except ObjectNotFound as error:
            raise NotFound(f"{version} has no receipt: no job of this release made it", param="version") from error

    def was_published(self, version: AdapterVersion) -> bool:
        """True if there is such a version, or was before it was deleted."""
        return version.version <= self._newest(version.name)

    def files(self, version: AdapterVersion) -> dict[str, bytes]:
        """The version's files.

        Raises:
            ModelNotFound: no such version.
            AdapterRejected: a file is missing or differs from the manifest's digest.
        """
        manifest = self.manifest(version)
        files: dict[str, bytes] = {}
        for filename, entry in manifest.files.items():
            try:
                data = self._store.get(f"{version_prefix(version)}{filename}").data
            except ObjectNotFound as error:
                self.manifest(version)  # removed since?
                raise AdapterRejected(f"{version}: {filename} is missing from the object store") from error
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise AdapterRejected(f"{version}: {filename} does not match its SHA-256 in the manifest")
            files[filename] = data
        return files

    def published(self, name: str, job_id: str) -> Manifest | None:
        """Version that this job published, if it got so far; the pointer may not have moved yet."""
        record = self._read_json(job_key(check_adapter_name(name), job_id))
        return self._read_manifest(AdapterVersion(name, int(record[0]["version"]))) if record is not None else None

    def published_any(self, name: str, job_id: str) -> bool:
        """Whether a version came of this job, be it one of an epoch, or is about to."""
        return bool(self._store.list(job_key(check_adapter_name(name), job_id)))

    # Writing.

    def check_new_name(self, name: str) -> None:
        """Raises InvalidRequest for a name that no adapter may have."""
        check_adapter_name(name)
        if name == self._served_model_name:
            raise InvalidRequest(
                f"adapter name {name!r} is the name of the base model, which would hide it: choose another",
                param="adapter",
            )

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        base_digest: str,
        job_id: str | None = None,
        parent: str | None = None,
        lineage: Lineage | None = None,
        metrics: Mapping[str, float] | None = None,
        gates: Sequence[GateEvidence] = (),
        dataset: DatasetOrigin | None = None,
        step: int | None = None,
        current: bool = True,
        once: str | None = None,
        loaded_from: str | None = None,
        receipt: Callable[[Manifest], Receipt] | None = None,
        fence: Callable[[], None] | None = None,
    ) -> Manifest:
        """Makes a new version of ``name``, and makes it current.

        Idempotent per job: a repeated publish returns the first one's manifest, however the first attempt died, and
        does not undo a rollback made in between. Concurrent publishers get distinct numbers.

        Args:
            files: adapter_model.safetensors and adapter_config.json, or drafter.safetensors and drafter.json.
            step: see Manifest; each is published once.
            current: False: it stays a candidate, which answers only who names it, until a canary or a rollback to it
                makes it current.
            once: name under which it is published once, as that of a job is, where no job makes it.
            loaded_from: see Manifest.
            receipt: makes what is kept beside the version of the manifest that it is about to get.
            fence: called right before the manifest and right before the pointer is written; raises if the caller
                lost the right to publish.

        Raises:
            AdapterRejected: the set of files or adapter_config.json is malformed.
            InvalidRequest: no adapter may have this name, or its versions are of another kind.
        """
        self.check_new_name(name)
        kind, rank = kind_of(files), stated_rank(files)
        self.check_kind(name, kind)
        version = self._claim(name, publication(job_id, step) or once)
        manifest = self._read_manifest(version)
        if manifest is None:
            entries = {filename: self._put_file(version, filename, data) for filename, data in sorted(files.items())}
            manifest = Manifest(
                name=name,
                version=version.version,
                kind=kind,
                digest=files_digest(entries),
                base_digest=base_digest,
                files=entries,
                rank=rank,
                job_id=job_id,
                parent=parent,
                lineage=lineage,
                created_at=time.time(),
                metrics=dict(metrics or {}),
                gates=tuple(gates),
                dataset=dataset,
                loaded_from=loaded_from,
                step=step,
            )
            if fence is not None:
                fence()
            if receipt is not None:
                self._store.put(receipt_key(version), receipt(manifest).to_bytes())
            manifest = self._put_manifest(version, manifest)
        if current:
            if fence is not None:
                fence()
            self.advance(manifest)
        return manifest

    def keep_canary(self, version: AdapterVersion, canary_id: str, record: str) -> None:
        """Keeps beside a version the JSON of the canary by which it becomes current. Raises ModelNotFound."""
        self.manifest(version)
        self._store.put(canary_key(version, canary_id), record.encode())

    def delete(self, name: str) -> None:
        """Removes an adapter with all its versions.

        Raises:
            ModelNotFound: there is no such adapter.
            Conflict: a version of it is attached.
        """
        if not self.versions(name):  # candidates alone are one, too
            self.current(name)
        attached = self.attached()
        if attached is not None and attached.name == name:
            raise Conflict(f"adapter {attached} is attached to the base model; detach it first", param="adapter")
        newest = self._newest(name)
        self._store.put(f"deleted/{name}", json.dumps(POINTER.stamped({"newest": newest})).encode())
        self._store.delete(current_key(name))
        keys = self._store.list(f"adapters/{name}/")
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest.json")):
            self._store.delete(key)

    # Parts.

    def _claim(self, name: str, job_id: str | None) -> AdapterVersion:
        """The number to publish as: the job's own from an earlier attempt, or the next free one."""
        record = job_key(name, job_id or "")
        if job_id is not None and (earlier := self._claimed(name, record)) is not None:
            return earlier
        claim = json.dumps({"job_id": job_id, "claim": uuid.uuid4().hex}).encode()
        number = self._newest(name) + 1
        for _ in range(RACES):
            try:
                self._store.put(f"{version_prefix(AdapterVersion(name, number))}claim", claim, if_absent=True)
                break
            except PreconditionFailed:
                number += 1
        else:
            raise Unavailable(f"too many concurrent publishers of adapter {name!r}; retry")
        if job_id is not None:
            try:
                self._store.put(record, json.dumps(POINTER.stamped({"version": number})).encode(), if_absent=True)
            except PreconditionFailed as error:  # a twin of this job was quicker: its number counts, ours stays empty
                if (twin := self._claimed(name, record)) is None:
                    raise Unavailable(f"the object store has {record} and does not find it; retry") from error
                return twin
        return AdapterVersion(name, number)

    def _claimed(self, name: str, record: str) -> AdapterVersion | None:
        """The number that a job has, by its record; None: it has none yet."""
        found = self._read_json(record)
        return None if found is None else AdapterVersion(name, int(found[0]["version"]))

    def _newest(self, name: str) -> int:
        deleted = self._read_json(f"deleted/{name}")
        numbers = [int(part) for part in self._store.list_dirs(versions_prefix(name)) if part.isdigit()]
        return max([*numbers, int(deleted[0]["newest"]) if deleted else 0])

    def _put_file(self, version: AdapterVersion, filename: str, data: bytes) -> FileEntry:
        key = f"{version_prefix(version)}{filename}"
        try:
            self._store.put(key, data, if_absent=True)
        except PreconditionFailed:
            # An earlier attempt of the same job wrote it and its bytes are as good; never overwrite what a twin may
            # already have described in a manifest.
            data = self._store.get(key).data
        return FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def _put_manifest(self, version: AdapterVersion, manifest: Manifest) -> Manifest:
        try:
            data = json.dumps(MANIFEST.stamped(manifest.model_dump(mode="json")), indent=1).encode()
            self._store.put(manifest_key(version), data, if_absent=True)
        except PreconditionFailed:
            return self.manifest(version)
        return manifest

    def _read_manifest(self, version: AdapterVersion) -> Manifest | None:
        try:
            data = self._store.get(manifest_key(version)).data
        except ObjectNotFound:
            return None
        try:
            return Manifest.model_validate(MANIFEST.unstamped(json.loads(data), f"the manifest of {version}"))
        except ValidationError as error:
            raise AdapterRejected(f"{version}: manifest.json is malformed: {error.error_count()} errors") from error
        except (ValueError, AttributeError) as error:
            raise AdapterRejected(f"{version}: manifest.json is no JSON object") from error
