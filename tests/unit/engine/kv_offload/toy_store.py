"""Object store in memory with what the tiers use, only for tests that call it thousands of times. Real servers are
under tests/integration."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import numpy as np

from services.common.errors import Unavailable
from services.common.storage.object_store import ListedObject, ObjectNotFound, PreconditionFailed
from services.engine.kv_offload.entry_format import WORD, Header, checksum, encode, weights
from services.engine.kv_offload.messages import Entry
from tests.unit.engine.kv_offload.toy_device import LAYOUT, content


class ToyStore:
    """The objects of one bucket. Thread-safe."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.away = False
        self.asked = 0
        self._lock = threading.Lock()

    def list_objects(self, prefix: str) -> list[ListedObject]:
        with self._lock:
            self._check()
            return [
                ListedObject(key, len(data), datetime.fromtimestamp(when, UTC))
                for key, (data, when) in sorted(self.objects.items())
                if key.startswith(prefix)
            ]

    def read_into(self, key: str, offset: int, target: memoryview) -> int:
        with self._lock:
            self._check()
            if key not in self.objects:
                raise ObjectNotFound(key)
            data = self.objects[key][0][offset : offset + len(target)]
        target[: len(data)] = data
        return len(data)

    def put(self, key: str, data: memoryview, *, if_absent: bool) -> str:
        with self._lock:
            self._check()
            if key in self.objects:
                raise PreconditionFailed(key)
            self.objects[key] = (bytes(data), time.time())
            return ""

    def delete(self, key: str) -> None:
        with self._lock:
            self._check()
            self.objects.pop(key, None)

    def _check(self) -> None:
        self.asked += 1
        if self.away:
            raise Unavailable("away")


def item(entry: Entry) -> bytes:
    """The object of an entry as another engine makes it."""
    blocks, state = content(entry)
    weight = weights(LAYOUT.slot_bytes // WORD)
    sums = np.array([*(checksum(block, weight) for block in blocks), checksum(state, weight)], np.int64)
    return encode(Header(entry, sums), LAYOUT) + blocks.tobytes() + state.tobytes()
