"""Ctrl-C that is not lost, and places that it must not disturb."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_SECONDS = 1.0
"""After a Ctrl-C, how long a command may go on before it is told again."""


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Notes each Ctrl-C as it raises KeyboardInterrupt, which libraries may turn into errors of their own (pydantic
    while it builds a model, as the openai client does at its first request), and which is lost where Python calls
    back and cannot raise (weak references, as of imports). So a command that goes on is told again; one that is on its
    way out, with an exception to handle, is not: what it stops and removes there may take a while."""
    noted: list[int] = []
    timer: threading.Timer | None = None
    told_again = False

    def tell_again() -> None:
        nonlocal told_again
        told_again = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal timer, told_again
        again, told_again = told_again, False
        noted.append(number)
        if timer is not None:
            timer.cancel()
        timer = threading.Timer(_AGAIN_SECONDS, tell_again)
        timer.daemon = True
        timer.start()
        if not (again and sys.exception() is not None):
            signal.default_int_handler(number, frame)

    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        if timer is not None:
            timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, Ctrl-C does nothing: for an end that must be orderly and takes a while."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
