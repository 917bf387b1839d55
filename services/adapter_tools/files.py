"""An adapter as a directory: PEFT's two files, and Temper's manifest.json if it came from Temper."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from services.common.adapters.manifest import CONFIG, WEIGHTS, FileEntry, Manifest, files_digest, instead_of
from services.common.errors import AdapterRejected, InvalidRequest

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """What lies in the directory."""

    files: dict[str, bytes]
    """Files by PEFT's names."""
    manifest: Manifest | None

    @classmethod
    def read(cls, directory: Path) -> AdapterDirectory:
        """Reads it and compares the files with the manifest.

        Raises:
            InvalidRequest: a file is missing or cannot be read.
            AdapterRejected: a file is not what the manifest says.
        """
        files = {name: _read(directory / name) for name in (WEIGHTS, CONFIG)}
        path = directory / MANIFEST
        if not path.exists():
            return cls(files, None)
        try:
            manifest = Manifest.model_validate_json(_read(path))
        except ValidationError as error:
            raise AdapterRejected(f"{path} is malformed: {error.error_count()} errors") from error
        for name, data in files.items():
            if manifest.files.get(name) != _entry(data):
                raise AdapterRejected(f"{directory / name} is not the file that {MANIFEST} describes")
        return cls(files, manifest)

    def with_files(self, files: dict[str, bytes]) -> AdapterDirectory:
        """The same adapter in other files: the manifest's digests are theirs."""
        if self.manifest is None:
            return AdapterDirectory(files, None)
        entries = {name: _entry(data) for name, data in files.items()}
        manifest = self.manifest.model_copy(update={"files": entries, "digest": files_digest(entries)})
        return AdapterDirectory(files, manifest)

    def write(self, directory: Path) -> None:
        """Into a directory that exists."""
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        if self.manifest is not None:
            (directory / MANIFEST).write_text(self.manifest.model_dump_json(indent=1), encoding="utf-8")

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for data in self.files.values())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        missing = f"{path} does not exist: an adapter has {WEIGHTS} and {CONFIG}"
        raise InvalidRequest(instead_of(path) or missing, param="adapter") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="adapter") from error


def _entry(data: bytes) -> FileEntry:
    return FileEntry(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
