"""Adapter versions in the object store: immutable objects, a pointer per adapter, and what is attached to the base.

Layout, under one bucket:
    adapters/{name}/versions/{n:08d}/claim              who took this number (If-None-Match)
    adapters/{name}/versions/{n:08d}/adapter_*          the PEFT files (If-None-Match)
    adapters/{name}/versions/{n:08d}/manifest.json      written last (If-None-Match): the version exists from here on
    adapters/{name}/jobs/{job id}                       which number a job publishes as (If-None-Match)
    adapters/{name}/CURRENT                             {"version": n, "newest": m}, moved by If-Match
    attached/{served model name}                        {"adapter": "name@n"} or {"adapter": null}
    deleted/{name}                                      {"newest": m}: a number is never used twice, also after delete
"""

from __future__ import annotations

import hashlib
import json
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import AdapterRejected, Conflict, InvalidRequest, ModelNotFound, Unavailable
from services.common.names import AdapterVersion, check_adapter_name, parse_adapter_ref
from services.common.store import ObjectNotFound, ObjectStore, PreconditionFailed

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_RACES = 64
"""Lost compare-and-swap rounds after which a writer gives up."""


class FileEntry(BaseModel):
    """One file of a version: lower-case hex SHA-256 and size in bytes."""

    model_config = ConfigDict(frozen=True)

    sha256: str
    size: int


class Manifest(BaseModel):
    """What a version is made of and where it came from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    version: int
    digest: str
    """SHA-256 over the files' digests: the identity of the weights in cache keys."""
    base_digest: str
    """Digest of the base checkpoint that the adapter belongs to."""
    files: dict[str, FileEntry]
    rank: int | None = None
    job_id: str | None = None
    parent: str | None = None
    """"name@n" that training started from."""
    created_at: float
    """Unix seconds."""
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def ref(self) -> AdapterVersion:
        return AdapterVersion(self.name, self.version)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class Pointers:
    """Every pointer at one moment. ``fingerprint`` changes whenever one of them does."""

    attached: AdapterVersion | None
    current: Mapping[str, int]
    fingerprint: str


class AdapterRegistry:
    """Adapter versions and pointers. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore, served_model_name: str) -> None:
        self._store = store
        self._served_model_name = served_model_name
        self._attachment = f"attached/{urllib.parse.quote(served_model_name, safe='')}"
        self._pointer_cache: dict[str, tuple[str, int]] = {}
        """name → (etag, version) of CURRENT as last read; replaced as a whole, so readers need no lock."""

    # Reading.

    def names(self) -> list[str]:
        """Adapters that have a current version, sorted."""
        return sorted(self.pointers().current)

    def versions(self, name: str) -> list[Manifest]:
        """Complete versions in ascending order; empty if there is no such adapter."""
        prefix = _versions(check_adapter_name(name))
        manifests = [key for key in self._store.list(prefix) if key.endswith("/manifest.json")]
        found = [self._read_manifest(AdapterVersion(name, int(key[len(prefix) :].split("/")[0]))) for key in manifests]
        return sorted((m for m in found if m is not None), key=lambda m: m.version)

    def manifest(self, version: AdapterVersion) -> Manifest:
        """Raises ModelNotFound if there is no such complete version."""
        manifest = self._read_manifest(version)
        if manifest is None:
            raise ModelNotFound(f"adapter version {version} does not exist", param="adapter")
        return manifest

    def current(self, name: str) -> AdapterVersion:
        """Raises ModelNotFound if the adapter has no version."""
        pointer = self._read_json(_current(check_adapter_name(name)))
        if pointer is None:
            raise ModelNotFound(f"adapter {name!r} does not exist", param="adapter")
        return AdapterVersion(name, int(pointer[0]["version"]))

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
                data = self._store.get(f"{_version(version)}{filename}").data
            except ObjectNotFound as error:
                raise AdapterRejected(f"{version}: {filename} is missing from the object store") from error
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise AdapterRejected(f"{version}: {filename} does not match its SHA-256 in the manifest")
            files[filename] = data
        return files

    def attached(self) -> AdapterVersion | None:
        """What the base model's name answers with; None: the base model itself."""
        pointer = self._read_json(self._attachment)
        return _parse_attachment(pointer[0]) if pointer is not None else None

    def pointers(self) -> Pointers:
        """All pointers, for polling: unchanged ones cost one HEAD each."""
        cache = self._pointer_cache
        fresh: dict[str, tuple[str, int]] = {}
        for name in self._store.list_dirs("adapters/"):
            etag = self._store.head(_current(name))
            if etag is None:
                continue
            known = cache.get(name)
            if known is not None and known[0] == etag:
                fresh[name] = known
                continue
            pointer = self._read_json(_current(name))
            if pointer is not None:
                fresh[name] = (pointer[1], int(pointer[0]["version"]))
        self._pointer_cache = fresh
        attached = self.attached()
        current = {name: version for name, (_, version) in fresh.items()}
        fingerprint = hashlib.sha256(json.dumps([str(attached), sorted(current.items())]).encode()).hexdigest()
        return Pointers(attached=attached, current=current, fingerprint=fingerprint)

    def published(self, name: str, job_id: str) -> Manifest | None:
        """What this job published, if it got so far; the pointer may not have moved yet."""
        record = self._read_json(f"adapters/{check_adapter_name(name)}/jobs/{job_id}")
        return self._read_manifest(AdapterVersion(name, int(record[0]["version"]))) if record is not None else None

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
        metrics: Mapping[str, float] | None = None,
        fence: Callable[[], None] | None = None,
    ) -> Manifest:
        """Makes a new version of ``name`` current.

        Idempotent per job: a repeated publish returns the first one's manifest, however the first attempt died, and
        does not undo a rollback made in between. Concurrent publishers get distinct numbers.

        Args:
            files: adapter_model.safetensors and adapter_config.json.
            fence: called right before the manifest and right before the pointer is written; raises if the caller
                lost the right to publish.

        Raises:
            AdapterRejected: the set of files or adapter_config.json is malformed.
            InvalidRequest: no adapter may have this name.
        """
        self.check_new_name(name)
        rank = _check_files(files)
        version = self._claim(name, job_id)
        manifest = self._read_manifest(version)
        if manifest is None:
            entries = {filename: self._put_file(version, filename, data) for filename, data in sorted(files.items())}
            manifest = Manifest(
                name=name,
                version=version.version,
                digest=_digest(entries),
                base_digest=base_digest,
                files=entries,
                rank=rank,
                job_id=job_id,
                parent=parent,
                created_at=time.time(),
                metrics=dict(metrics or {}),
            )
            if fence is not None:
                fence()
            manifest = self._put_manifest(version, manifest)
        if fence is not None:
            fence()
        self.advance(version)
        return manifest

    def advance(self, version: AdapterVersion) -> None:
        """Makes a new version current, unless it or a newer one has been before."""
        number = version.version
        self._move(version.name, lambda newest: (number, number) if number > newest else None)

    def set_current(self, version: AdapterVersion) -> None:
        """Moves the adapter's pointer, also backwards (rollback). Raises ModelNotFound if there is no such version."""
        self.manifest(version)
        self._move(version.name, lambda newest: (version.version, max(newest, version.version)))

    def attach(self, version: AdapterVersion, *, forward_only: bool = False) -> AdapterVersion:
        """Plain requests for the base model are answered with this version from now on; returns what is attached.

        Args:
            forward_only: leave a newer version of the same adapter attached; for jobs, whose end may be repeated.
        """
        self.manifest(version)
        data = json.dumps({"adapter": str(version)}).encode()
        for _ in range(_RACES):
            pointer = self._read_json(self._attachment)
            attached = _parse_attachment(pointer[0]) if pointer is not None else None
            if forward_only and attached is not None and attached.name == version.name and attached > version:
                return attached
            if self._swap(self._attachment, pointer, data):
                return version
        raise Unavailable("what is attached to the base model kept changing; retry")

    def detach(self) -> None:
        """Plain requests for the base model are answered by the base model."""
        self._store.put(self._attachment, json.dumps({"adapter": None}).encode())

    def delete(self, name: str) -> None:
        """Removes an adapter with all its versions.

        Raises:
            ModelNotFound: there is no such adapter.
            Conflict: a version of it is attached.
        """
        self.current(name)
        attached = self.attached()
        if attached is not None and attached.name == name:
            raise Conflict(f"adapter {attached} is attached to the base model; detach it first", param="adapter")
        newest = self._newest(name)
        self._store.put(f"deleted/{name}", json.dumps({"newest": newest}).encode())
        self._store.delete(_current(name))
        keys = self._store.list(f"adapters/{name}/")
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest.json")):
            self._store.delete(key)

    # Parts.

    def _claim(self, name: str, job_id: str | None) -> AdapterVersion:
        """The number to publish as: the job's own from an earlier attempt, or the next free one."""
        record = f"adapters/{name}/jobs/{job_id}"
        if job_id is not None:
            earlier = self._read_json(record)
            if earlier is not None:
                return AdapterVersion(name, int(earlier[0]["version"]))
        claim = json.dumps({"job_id": job_id, "claim": uuid.uuid4().hex}).encode()
        number = self._newest(name) + 1
        for _ in range(_RACES):
            try:
                self._store.put(f"{_version(AdapterVersion(name, number))}claim", claim, if_absent=True)
                break
            except PreconditionFailed:
                number += 1
        else:
            raise Unavailable(f"too many concurrent publishers of adapter {name!r}; retry")
        if job_id is not None:
            try:
                self._store.put(record, json.dumps({"version": number}).encode(), if_absent=True)
            except PreconditionFailed:  # a twin of this job was quicker: its number counts, ours stays empty
                return self._claim(name, job_id)
        return AdapterVersion(name, number)

    def _newest(self, name: str) -> int:
        deleted = self._read_json(f"deleted/{name}")
        numbers = [int(part) for part in self._store.list_dirs(_versions(name)) if part.isdigit()]
        return max([*numbers, int(deleted[0]["newest"]) if deleted else 0])

    def _put_file(self, version: AdapterVersion, filename: str, data: bytes) -> FileEntry:
        key = f"{_version(version)}{filename}"
        try:
            self._store.put(key, data, if_absent=True)
        except PreconditionFailed:
            # An earlier attempt of the same job wrote it and its bytes are as good; never overwrite what a twin may
            # already have described in a manifest.
            data = self._store.get(key).data
        return FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def _put_manifest(self, version: AdapterVersion, manifest: Manifest) -> Manifest:
        try:
            self._store.put(_manifest(version), manifest.model_dump_json(indent=1).encode(), if_absent=True)
        except PreconditionFailed:
            return self.manifest(version)
        return manifest

    def _read_manifest(self, version: AdapterVersion) -> Manifest | None:
        try:
            data = self._store.get(_manifest(version)).data
        except ObjectNotFound:
            return None
        try:
            return Manifest.model_validate_json(data)
        except ValidationError as error:
            raise AdapterRejected(f"{version}: manifest.json is malformed: {error.error_count()} errors") from error

    def _move(self, name: str, target: Callable[[int], tuple[int, int] | None]) -> None:
        for _ in range(_RACES):
            pointer = self._read_json(_current(name))
            moved = target(int(pointer[0].get("newest", pointer[0]["version"])) if pointer else 0)
            if moved is None:
                return
            if self._swap(_current(name), pointer, json.dumps({"version": moved[0], "newest": moved[1]}).encode()):
                return
        raise Unavailable(f"the pointer of adapter {name!r} kept moving; retry")

    def _swap(self, key: str, pointer: tuple[dict[str, Any], str] | None, data: bytes) -> bool:
        """Writes a pointer, unless somebody has moved it since ``pointer`` was read; whether it did."""
        try:
            if pointer is None:
                self._store.put(key, data, if_absent=True)
            else:
                self._store.put(key, data, if_match=pointer[1])
        except PreconditionFailed:
            return False
        return True

    def _read_json(self, key: str) -> tuple[dict[str, Any], str] | None:
        """The object's JSON and its etag."""
        try:
            stored = self._store.get(key)
        except ObjectNotFound:
            return None
        return json.loads(stored.data), stored.etag


def _versions(name: str) -> str:
    return f"adapters/{name}/versions/"


def _version(version: AdapterVersion) -> str:
    return f"{_versions(version.name)}{version.version:08d}/"


def _manifest(version: AdapterVersion) -> str:
    return f"{_version(version)}manifest.json"


def _current(name: str) -> str:
    return f"adapters/{name}/CURRENT"


def _parse_attachment(pointer: Mapping[str, Any]) -> AdapterVersion | None:
    ref = pointer.get("adapter")
    if ref is None:
        return None
    name, number = parse_adapter_ref(str(ref))
    return AdapterVersion(name, number) if number is not None else None


def _digest(entries: Mapping[str, FileEntry]) -> str:
    lines = "\n".join(f"{filename}:{entry.sha256}" for filename, entry in sorted(entries.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _check_files(files: Mapping[str, bytes]) -> int | None:
    """The rank that adapter_config.json states. Raises AdapterRejected."""
    if set(files) != {WEIGHTS, CONFIG}:
        raise AdapterRejected(f"an adapter has exactly the files {WEIGHTS} and {CONFIG}, got {sorted(files)}")
    try:
        config = json.loads(files[CONFIG])
    except ValueError as error:
        raise AdapterRejected(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRejected(f"{CONFIG} must be a JSON object")
    rank = config.get("r")
    return rank if isinstance(rank, int) else None
