"""The directory that a checkpoint is fetched into: locked, and changed only once everything new has been checked.

Files are fetched into ``.fetch`` inside it (so on the same volume, also where it is itself a mount point) and moved
when their digest is right. A move that a crash interrupts is finished at the next start, because ``.fetch/ready`` names
what was being moved.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import checkpoint_digest
from services.model_source.errors import SourceRejected
from services.model_source.files import RemoteFile, is_wanted, notes

log = structlog.get_logger(__name__)

_LOCK = ".fetch.lock"
_READY = "ready"
_RECORD = ".source.json"
_WAIT_SECONDS = 1.0
_SAY_SECONDS = 30.0
_SPARE_BYTES = 64 * 2**20
"""What is left free of a volume."""


class Target:
    """One model directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / ".fetch"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else fetches into the directory meanwhile: replicas of an engine share a volume, and start at once.

        Raises:
            SourceRejected: the directory cannot be written, or its volume has no file locks.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / _LOCK).open("a")
        except OSError as error:
            raise self._not_writable(error) from error
        with handle:
            said = 0.0
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - said > _SAY_SECONDS:
                        said = time.monotonic()
                        log.info("model_source_waits", reason="another process fetches into the same directory")
                    time.sleep(_WAIT_SECONDS)
                except OSError as error:
                    raise SourceRejected(
                        "TEMPER_MODEL", f"the volume of {self.path} has no file locks ({error.strerror}); use another"
                    ) from error
            yield

    def prepare(self) -> None:
        """Finishes a move that was interrupted, and makes the staging directory.

        Raises:
            SourceRejected: it cannot be written.
        """
        try:
            self._finish()
            self.staging.mkdir(exist_ok=True)
        except OSError as error:
            raise self._not_writable(error) from error

    def digest(self) -> str | None:
        """Digest of the checkpoint that is there; None if there is none that can be read."""
        return _digest_or_none(self.path)

    def has(self, files: Sequence[RemoteFile], source: str) -> bool:
        """Whether exactly these files were put here before, and are still there with their sizes."""
        try:
            record = json.loads((self.path / _RECORD).read_text())
            sizes = [(self.path / file.name).stat().st_size == file.size for file in files]
        except (OSError, ValueError):
            return False
        return bool(record == _record(files, source)) and all(sizes)

    def check_space(self, missing: int) -> None:
        """Raises SourceRejected, with the numbers, if so many bytes do not fit."""
        free = shutil.disk_usage(self.path).free
        if missing + _SPARE_BYTES > free:
            raise SourceRejected(
                "TEMPER_MODEL",
                f"the volume of {self.path} has {_mib(free)} free, and {_mib(missing + _SPARE_BYTES)} are needed: "
                "make it larger (a new checkpoint is fetched beside the old one, and replaces it once it is checked)",
            )

    def take(self, files: Sequence[RemoteFile], source: str) -> None:
        """Moves the fetched files to their places and removes weights that are not among them.

        Raises:
            OSError: a file could not be moved; the next start goes on.
        """
        for file in files:
            with (self.staging / file.name).open("rb") as handle:
                os.fsync(handle.fileno())
        ready = self.staging / f"{_READY}.new"
        ready.write_text(json.dumps(_record(files, source)))
        ready.replace(self.staging / _READY)
        self._finish()

    def _finish(self) -> None:
        ready = self.staging / _READY
        if not ready.is_file():
            return
        record = json.loads(ready.read_text())
        names = {name for name, _, _ in record["files"]}
        for name in sorted(names):
            if (self.staging / name).is_file():
                (self.staging / name).replace(self.path / name)
        for path in self.path.iterdir():
            if path.is_file() and path.name not in names and is_wanted(path.name):
                path.unlink()
        (self.path / _RECORD).write_text(json.dumps(record))
        self.clear()

    def keep_only(self, files: Sequence[RemoteFile]) -> None:
        """Forgets what was fetched of an earlier state of the source and is no part of this one."""
        kept = {name for file in files for name in (file.name, *notes(file.name))}
        for path in self.staging.iterdir():
            if path.name not in kept:
                path.unlink()

    def clear(self) -> None:
        """Forgets what was fetched and not taken. The note of a move goes last."""
        for path in sorted(self.staging.iterdir(), key=lambda path: path.name == _READY):
            path.unlink()
        self.staging.rmdir()

    def _not_writable(self, error: OSError) -> SourceRejected:
        return SourceRejected(
            "TEMPER_MODEL",
            f"{self.path} cannot be written by user {os.getuid()}: {error.strerror or error}; "
            "mount a volume there that the pod's fsGroup may write",
        )


def _digest_or_none(path: Path) -> str | None:
    try:
        return checkpoint_digest(path)
    except CheckpointRejected:
        return None


def _record(files: Sequence[RemoteFile], source: str) -> dict[str, object]:
    return {"source": source, "files": sorted([file.name, file.size, file.version] for file in files)}


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
