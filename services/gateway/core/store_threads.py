"""Threads for blocking calls to the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.common.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 8
_MAX_CALLS = 64


class StoreThreads:
    """Thread pool for the object store.

    It is apart from all others: while the store hangs, tokenizing must not wait behind it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "store")
        self._calls = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to the object store in a thread.

        Raises:
            Unavailable: too many calls wait for the store already, or what the call raises.
        """
        if self._calls >= _MAX_CALLS:
            raise Unavailable("too many requests wait for the object store", retry_after=5.0)
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        finally:
            self._calls -= 1

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
