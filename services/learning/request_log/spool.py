"""Spool: logged requests on the local disk until the object store has them.

One file a part, two lines a request: what the index needs of it, and the request. A file is locked by the process that
writes it; one without a lock is complete, or its writer has died, and whoever finds it hands it on. A last line that
was cut off by that is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pydantic_core import from_json, to_json

from services.common.errors import InvalidRequest
from services.learning.request_log.index import Entry
from services.learning.request_log.parts import part_name

PART_BYTES: Final = 4 * 2**20
"""Size at which a part is complete."""
_SUFFIX = ".part"


@dataclass(frozen=True, slots=True)
class SpooledPart:
    """A complete file: the part's name, and its requests in their order."""

    part: str
    requests: Sequence[tuple[Entry, bytes]]


class Spool:
    """Directory of parts that wait. Appending is for one thread, handing on for another.

    Args:
        directory: made if it is not there; only this user may read it.
        limit: bytes that may wait.

    Raises:
        InvalidRequest: the directory cannot be used.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.getuid():
                raise InvalidRequest(f"{directory} belongs to another user", param="request_log_spool")
            directory.chmod(0o700)
        except OSError as error:
            raise InvalidRequest(f"{directory} cannot be used: {error.strerror}", param="request_log_spool") from error
        self._directory = directory
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._began = 0.0
        self._size = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes on the disk."""
        total = 0
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    def has_room(self) -> bool:
        """True if another request may be appended."""
        return self.waiting_bytes < self._limit

    def append(self, entries: Sequence[tuple[Entry, bytes]]) -> str | None:
        """Appends requests, of which each is a line without its end; the part's name, if they begin one. Raises
        OSError."""
        begun = self._begin(entries[0][0].at) if self._file is None else None
        if self._file is None:
            raise OSError("the spool has no file")
        data = b"".join(
            to_json([one.id, one.at, one.owner, one.user, one.session, one.also]) + b"\n" + line + b"\n"
            for one, line in entries
        )
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        return begun

    def parts(self) -> Sequence[str]:
        """Names of all parts on the disk, whoever writes them."""
        return [_part_of(file) for file in self._files()]

    def complete(self, *, older_than: float = 0.0) -> bool:
        """Completes the part that is being written, if it is full or was begun so many seconds ago; True: it did."""
        if self._file is None or (self._size < PART_BYTES and time.monotonic() - self._began < older_than):
            return False
        self._file.close()  # and with it goes the lock
        self._file = None
        return True

    @contextlib.contextmanager
    def next(self) -> Iterator[SpooledPart | None]:
        """The oldest complete part, which is removed if the block ends without an error; None: there is none."""
        for file in self._files():
            try:
                handle = file.open("rb")
            except FileNotFoundError:  # another gateway was quicker
                continue
            with handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                if not file.exists():
                    continue
                yield SpooledPart(_part_of(file), _requests(handle.read()))
                file.unlink()
                return
        yield None

    def _begin(self, at: float) -> str:
        while True:
            part = part_name(at)
            handle = (self._directory / (part.replace("/", "-") + _SUFFIX)).open("xb")
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle.fileno()).st_nlink:
                break
            handle.close()  # a reader came between the file and its lock, found nothing in it and removed it
        self._file, self._began, self._size = handle, time.monotonic(), 0
        return part

    def _files(self) -> Sequence[Path]:
        return sorted(self._directory.glob(f"*{_SUFFIX}"))


def _part_of(file: Path) -> str:
    return file.name.removesuffix(_SUFFIX).replace("-", "/")


def _requests(data: bytes) -> list[tuple[Entry, bytes]]:
    lines = data.split(b"\n")[:-1]  # behind the last line's end there is nothing, or a line that was cut off
    found = []
    for head, line in zip(lines[::2], lines[1::2], strict=False):
        name, at, owner, user, session, also = from_json(head)
        found.append((Entry(name, at, owner, user, session, tuple(also)), line))
    return found
