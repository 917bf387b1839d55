"""Nudges between services: an adapter was published, attached, moved or deleted.

A nudge makes an engine read the pointers now instead of at its next poll. The pointers in the object store are the
truth, so a lost nudge costs a second, never correctness.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import redis

from services.common.adapters.names import AdapterVersion
from services.common.settings import CommonSettings
from services.common.storage.redis import BLOCK_SECONDS, call, call_async, connect, connect_async

STREAM = "temper:adapters"
LENGTH = 1_000
EventKind = Literal["published", "attached", "detached", "current", "deleted"]


class AdapterEvents:
    """Both ends of the stream of adapter events. ``publish`` is thread-safe; one thread may ``wait``."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect(settings)
        self._async = connect_async(settings)
        self._seen: str | None = None
        self._closed = threading.Event()

    def publish(self, kind: EventKind, version: AdapterVersion | str | None = None) -> None:
        """``version``: what the event is about, or an adapter's name. Raises Unavailable."""
        call(lambda: self._redis.xadd(STREAM, _fields(kind, version), maxlen=LENGTH, approximate=True))

    async def publish_async(self, kind: EventKind, version: AdapterVersion | str | None = None) -> None:
        """`publish` for asyncio. Raises Unavailable."""
        await call_async(lambda: self._async.xadd(STREAM, _fields(kind, version), maxlen=LENGTH, approximate=True))

    def wait(self, timeout: float) -> bool:
        """Blocks until something happened since the last call, or for ``timeout`` seconds; True if it did.

        Never raises for an absent Redis: it then waits in vain, and the caller polls.
        """
        waited = 0.0
        while not self._closed.is_set():
            block = min(BLOCK_SECONDS, timeout - waited)
            try:
                if self._seen is None:
                    newest: Any = self._redis.xrevrange(STREAM, count=1)
                    self._seen = newest[0][0] if newest else "0"
                reply: Any = self._redis.xread({STREAM: self._seen}, count=LENGTH, block=max(1, int(block * 1000)))
            except (redis.exceptions.RedisError, OSError):
                reply = None
                self._closed.wait(max(0.0, block))
            except (ValueError, AttributeError):  # close() shut or dropped the buffer that this thread reads from
                if not self._closed.is_set():
                    raise
                return False
            if reply:
                self._seen = reply[0][1][-1][0]
                return True
            waited += block
            if waited >= timeout:
                return False
        return False

    def close(self) -> None:
        """Ends a wait within two seconds. Call `aclose` instead where publish_async was used."""
        self._closed.set()
        self._redis.close()

    async def aclose(self) -> None:
        self.close()
        await self._async.aclose()


def _fields(kind: EventKind, version: AdapterVersion | str | None) -> dict[Any, Any]:
    return {"kind": kind, "adapter": str(version) if version is not None else ""}
