"""An object store in this process: what publishing costs without a network and a server."""

from __future__ import annotations

import itertools
import threading

from services.common.store import Keys, ObjectNotFound, ObjectStore, PreconditionFailed, StoredObject


class MemoryStore(ObjectStore):
    """ObjectStore's objects in a dictionary. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, StoredObject] = {}
        self._writes = itertools.count()

    def get(self, key: str) -> StoredObject:
        """See ObjectStore."""
        with self._lock:
            if key not in self._objects:
                raise ObjectNotFound(f"no such object (get {key})")
            return self._objects[key]

    def put(self, key: str, data: bytes | memoryview, *, if_match: str | None = None, if_absent: bool = False) -> str:
        """See ObjectStore."""
        with self._lock:
            now = self._objects.get(key)
            if (if_absent and now is not None) or (if_match is not None and (now is None or now.etag != if_match)):
                raise PreconditionFailed(f"condition does not hold (put {key})")
            etag = str(next(self._writes))
            self._objects[key] = StoredObject(bytes(data), etag)
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

    def list_dirs(self, prefix: str) -> Keys:
        """See ObjectStore."""
        with self._lock:
            rests = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({rest.split("/")[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        with self._lock:
            self._objects.pop(key, None)
