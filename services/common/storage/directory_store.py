"""An object store in a directory of this machine, for work that has no server: keys are paths below it."""

from __future__ import annotations

import hashlib
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.storage.durable import sync_directory
from services.common.storage.object_store import (
    Keys,
    ListedObject,
    Listing,
    ObjectNotFound,
    ObjectStore,
    PreconditionFailed,
    StoredObject,
)

_PARTIAL = ".partial-"


class DirectoryStore(ObjectStore):
    """ObjectStore's objects as files, each there whole or not at all, also after a crash. Conditions hold against other
    threads and processes for ``if_absent``; ``if_match`` is for one writer at a time.

    Every method raises InvalidRequest if the disk is full or not writable: waiting does not help, as it does where a
    server is away.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, key: str) -> StoredObject:
        """See ObjectStore."""
        try:
            data = self._path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ObjectNotFound(f"no such object (get {key})") from error
        except OSError as error:
            raise self._away(f"get {key}", error) from error
        return StoredObject(data, _etag(data))

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """See ObjectStore."""
        data = self.get(key).data[offset : offset + len(target)]
        target[: len(data)] = data
        return len(data)

    def put(self, key: str, data: bytes | memoryview, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """See ObjectStore."""
        path = self._path(key)
        if if_match is not None and self.head(key) != if_match:
            raise PreconditionFailed(f"condition does not hold (put {key})")
        scratch = path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if if_absent:
                os.link(scratch, path)
            else:
                scratch.replace(path)
            sync_directory(path.parent)
        except FileExistsError as error:
            raise PreconditionFailed(f"condition does not hold (put {key})") from error
        except OSError as error:
            raise self._away(f"put {key}", error) from error
        finally:
            scratch.unlink(missing_ok=True)
        return _etag(data)

    def head(self, key: str) -> str | None:
        """See ObjectStore."""
        try:
            return self.get(key).etag
        except ObjectNotFound:
            return None

    def list(self, prefix: str, recursive: bool = True) -> Keys:
        """See ObjectStore."""
        found = [entry.key for entry in self.list_objects(prefix)]
        return [key for key in found if recursive or "/" not in key[len(prefix) :]]

    def list_objects(self, prefix: str) -> Listing:
        """See ObjectStore."""
        found = []
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = Path(directory) / name
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and not name.startswith(_PARTIAL):
                    status = path.stat()
                    found.append(ListedObject(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
        return sorted(found, key=lambda entry: entry.key)

    def list_dirs(self, prefix: str) -> Keys:
        """See ObjectStore."""
        rests = [key[len(prefix) :] for key in self.list(prefix)]
        return sorted({rest.split("/")[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise self._away(f"delete {key}", error) from error

    def check(self) -> None:
        """See ObjectStore: a directory honours conditions."""

    def _path(self, key: str) -> Path:
        if not key or key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"{key!r} is no key of an object")
        return self._root / key

    def _away(self, what: str, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"{self._root} cannot be used ({what}): {error.strerror or error}")


def _etag(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
