"""Entrance of a compute gate's ``training()``: one thread at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Entrance:
    """Lets threads in one after another: the trainer's own, and the loops of engines that compute in its turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: deque[int] = deque()
        """The thread that is inside, and those that wait behind it."""

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Context manager that one thread is inside of.

        Raises:
            RuntimeError: this thread is inside already, and would wait for itself.
        """
        thread = threading.get_ident()
        with self._changed:
            if thread in self._threads:
                raise RuntimeError("training() is entered twice")
            self._threads.append(thread)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._threads[0] == thread)
            yield
        finally:
            with self._changed:
                self._threads.remove(thread)
                self._changed.notify_all()
