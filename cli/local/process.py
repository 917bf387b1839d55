"""Small things about processes: a death signal, a lock on a directory, the end of a log."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from services.common.errors import Conflict

_PR_SET_PDEATHSIG = 1
LOG_BYTES = 32 * 2**20
"""Size of a log from which it is moved aside."""


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """A preexec_fn after which the kernel kills the child when its parent ends, however that ends (Linux; else None).

    Args:
        parent: pid of the caller: if it ended between fork and the call, the child ends at once.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(127)

    return ask


class DirectoryLock:
    """Holds an exclusive lock on a directory until closed; a dead owner's lock is free by itself (flock)."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock.

        Raises:
            Conflict: another process holds it.
        """
        path = directory / "lock"
        self._file: IO[str] = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise Conflict(
                f"the data directory {directory} is in use by another `temper up` (process {owner}): stop that one or "
                "choose another directory with --data-dir"
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def private_files(directory: Path) -> Iterator[None]:
    """Makes a directory; until the end, what this process and its children write is for their user alone.

    Folders in it that an earlier start left open to others are closed. The directory itself is not: where it was there
    before, it is somebody else's.
    """
    before = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for folder in directory.iterdir():
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                folder.chmod(0o700)
        yield
    finally:
        os.umask(before)


def tail(path: Path, *, lines: int, offset: int = 0) -> list[str]:
    """The last lines of a text file, looking only at what was written after ``offset`` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(offset, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def rotate_log(path: Path, *, limit: int = LOG_BYTES) -> None:
    """Moves a log over ``limit`` bytes aside, so that a data directory does not grow with every restart."""
    if path.exists() and path.stat().st_size > limit:
        path.replace(path.with_suffix(".1.log"))


def empty_log(path: Path, *, limit: int = LOG_BYTES) -> bool:
    """Empties a log over ``limit`` bytes that a process goes on appending to, and keeps it aside until the next time;
    whether it did. Lines that are written in this moment are lost."""
    if not path.exists() or path.stat().st_size <= limit:
        return False
    shutil.copyfile(path, path.with_suffix(".1.log"))
    os.truncate(path, 0)
    return True
