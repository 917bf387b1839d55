"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

The gateway's code is asyncio code. On this loop it runs as it is, its sleeps, timeouts and pauses included, and an hour
takes as long as what happens in it takes to compute.
"""

from __future__ import annotations

import asyncio
import gc
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_Ready = list[tuple[selectors.SelectorKey, int]]


class _Clock(selectors.SelectSelector):
    """A selector that passes the time. No file ever becomes ready: everything happens in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> _Ready:
        if timeout is None:
            raise RuntimeError("nothing is left to happen: a task waits for what nobody will do")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose time() begins at 0 and passes only while nothing is left to do."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(  # type: ignore[override]  # a future of this loop that is done is an awaitable, too
        self, executor: object, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Runs a function at once: what another thread does takes no virtual time, and ends at no particular one."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, _T], seed: int) -> _T:
    """Runs a coroutine in virtual time. The random module is seeded: pauses of the gateway's connections are drawn.

    Garbage is collected rarely meanwhile: hundreds of engines are millions of objects that live as long as the run, and
    looking through them again and again would be a quarter of its time.
    """
    random.seed(seed)
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 1000)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
