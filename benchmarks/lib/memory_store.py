"""An object store in this process: without a network and a server."""

from __future__ import annotations

import itertools
import threading
from datetime import UTC, datetime

from services.common.storage.object_store import (
    Keys,
    ListedObject,
    Listing,
    ObjectNotFound,
    ObjectStore,
    PreconditionFailed,
    StoredObject,
)


class MemoryStore(ObjectStore):
    """ObjectStore's objects in a dictionary. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._modified: dict[str, datetime] = {}
        self._writes = itertools.count()

    def get(self, key: str) -> StoredObject:
        """See ObjectStore."""
        with self._lock:
            if key not in self._objects:
                raise ObjectNotFound(f"no such object (get {key})")
            return self._objects[key]

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        """See ObjectStore."""
        data = self.get(key).data[offset : offset + len(target)]
        target[: len(data)] = data
        return len(data)

    def put(self, key: str, data: bytes | memoryview, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """See ObjectStore."""
        with self._lock:
            now = self._objects.get(key)
            if (if_absent and now is not None) or (if_match is not None and (now is None or now.etag != if_match)):
                raise PreconditionFailed(f"condition does not hold (put {key})")
            etag = str(next(self._writes))
            self._objects[key] = StoredObject(bytes(data), etag)
            self._modified[key] = datetime.now(UTC)
            return etag

    def head(self, key: str) -> str | None:
        """See ObjectStore."""
        with self._lock:
            found = self._objects.get(key)
            return None if found is None else found.etag

    def list(self, prefix: str, recursive: bool = True) -> Keys:
        """See ObjectStore."""
        with self._lock:
            keys = [key for key in self._objects if key.startswith(prefix)]
        return sorted(key for key in keys if recursive or "/" not in key[len(prefix) :])

    def list_page(self, prefix: str, after: str, limit: int) -> Keys:
        """See ObjectStore."""
        return [key for key in self.list(prefix) if key > f"{prefix}{after}"][:limit]

    def list_objects(self, prefix: str) -> Listing:
        """See ObjectStore."""
        with self._lock:
            found = sorted((key, len(each.data)) for key, each in self._objects.items() if key.startswith(prefix))
            return [ListedObject(key, size, self._modified[key]) for key, size in found]

    def list_dirs(self, prefix: str) -> Keys:
        """See ObjectStore."""
        with self._lock:
            rests = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({rest.split("/")[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        with self._lock:
            self._objects.pop(key, None)
            self._modified.pop(key, None)
