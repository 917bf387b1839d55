"""The end of a connection on which the client may still be sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_LINGER_SECONDS = 2.0


class LingeringTransport(asyncio.Transport):
    """A transport whose ``close`` keeps the last answer readable (RFC 9112, 9.6).

    A socket that is closed with bytes that nobody has read resets its connection, and the client loses what it has not
    read yet: the answer to an upload that was refused early. So this one ends what is sent, throws away what still
    comes, and closes when the client does, or after two seconds.

    Args:
        inner: the connection's own.
        busy: whether the client may be sending; a connection without a request is closed at once.
    """

    def __init__(self, inner: asyncio.Transport, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._busy = busy
        self._ended = False
        self.write = inner.write  # type: ignore[method-assign] # once a piece of a stream: without a call in between

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._busy() or not self._inner.can_write_eof():
            self._inner.close()
            return
        self._ended = True
        self._inner.write_eof()
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._inner.close)

    def is_closing(self) -> bool:
        return self._ended or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def pause_reading(self) -> None:
        if not self._ended:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)
