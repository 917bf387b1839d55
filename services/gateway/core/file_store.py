"""File store: files that clients upload and that batches write, in the object store, and the threads that call it.

Objects:
    files/{owner}/{id}/{000000}     the content in pieces of PIECE_BYTES: objects are written by one PUT each, and no
                                    process ever holds a whole file
    files/{owner}/{id}/file.json    the FileInfo, written last and removed first: a file exists while this does
    file-expiry/{unix}/{owner}/{id} empty: what to look at then. A file that is being written has one for a day later:
                                    what an interrupted upload left is removed as well

``owner`` is the digest of who owns the file, so one owner's ids mean nothing to another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from services.common.errors import NewerSchema, NotFound, Unavailable
from services.common.storage.ids import PATTERN, key_of, ulid
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.storage.record_versions import FILE
from services.common.validation.strict_models import StrictModel

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


PIECE_BYTES = 4 * 2**20
Purpose = Literal["batch", "batch_output", "fine-tune"]
_ROOT = "files"
_EXPIRY = "file-expiry"
_UNFINISHED_SECONDS = 86_400
_ID = re.compile(rf"file-{PATTERN}")

# Spelled out, because FileStore has a method `list`.
Ids: TypeAlias = list[str]


class FileInfo(StrictModel):
    """Metadata of a file."""

    id: str
    bytes: int
    created_at: int
    """Unix seconds, like every time here."""
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    sha256: str
    pieces: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written.

    Args:
        owner: whose it is.
        seconds: after which it expires; None: never.
    """

    owner: str
    id: str
    filename: str
    purpose: Purpose
    created_at: int
    seconds: int | None = None


def new_file_id() -> str:
    """`file-` and 26 characters that sort by time."""
    return "file-" + ulid()


class FileStore:
    """Files in an object store. Thread-safe; every method blocks and may raise Unavailable."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def objects(self) -> ObjectStore:
        """Object store that holds the files."""
        return self._store

    def create(self, new: NewFile, content: Iterable[bytes]) -> FileInfo:
        """Writes a file; the same id and content may be written again.

        Args:
            content: in blocks of any size; what it raises ends the writing and leaves no file.
        """
        prefix = self._prefix(new.owner, new.id)
        guard = self._expiry(int(time.time()) + _UNFINISHED_SECONDS, new.owner, new.id)
        self._store.put(guard, b"")
        digest, size, pieces = hashlib.sha256(), 0, 0
        try:
            for piece in _pieces(content):
                self._store.put(f"{prefix}{pieces:06d}", piece)
                digest.update(piece)
                size, pieces = size + len(piece), pieces + 1
            expires_at = None if new.seconds is None else new.created_at + new.seconds
            if expires_at is not None:
                self._store.put(self._expiry(expires_at, new.owner, new.id), b"")
            info = FileInfo(
                id=new.id,
                bytes=size,
                created_at=new.created_at,
                expires_at=expires_at,
                filename=new.filename,
                purpose=new.purpose,
                sha256=digest.hexdigest(),
                pieces=pieces,
            )
            self._store.put(f"{prefix}file.json", json.dumps(FILE.stamped(info.model_dump())).encode())
        except Unavailable:
            raise  # the store is away: the guard is there for what was written
        except Exception:
            self._store.delete_prefix(prefix)
            self._store.delete(guard)
            raise
        self._store.delete(guard)
        return info

    def get(self, owner: str, file_id: str) -> FileInfo:
        """Raises NotFound: no such file, or it has expired."""
        if _ID.fullmatch(file_id) is None:
            raise _missing(file_id)
        try:
            info = self._info(self._prefix(owner, file_id))
        except ObjectNotFound as error:
            raise _missing(file_id) from error
        if info.expires_at is not None and info.expires_at <= time.time():
            raise _missing(file_id)
        return info

    def ids(self, owner: str) -> Ids:
        """Ids of all files of an owner, oldest first; some may be gone when they are read."""
        return [name for name in self._store.list_dirs(f"{_ROOT}/{key_of(owner)}/") if _ID.fullmatch(name)]

    def piece(self, owner: str, info: FileInfo, number: int) -> bytes:
        """One piece of the content. Raises NotFound if the file was deleted meanwhile."""
        try:
            return self._store.get(f"{self._prefix(owner, info.id)}{number:06d}").data
        except ObjectNotFound as error:
            raise _missing(info.id) from error

    def delete(self, owner: str, file_id: str) -> None:
        """Raises NotFound."""
        self.get(owner, file_id)
        self._remove(self._prefix(owner, file_id))

    def sweep(self) -> int:
        """Removes files that have expired and what interrupted uploads left; returns how many. Files of a later release
        stay."""
        removed = 0
        for key in self._store.list(f"{_EXPIRY}/"):
            _, at, owner, file_id = key.split("/")
            if int(at) > time.time():
                break
            prefix = f"{_ROOT}/{owner}/{file_id}/"
            try:
                over = self._is_over(prefix)
            except NewerSchema:  # left to a gateway that knows it
                continue
            if over:
                self._remove(prefix)
                removed += 1
            self._store.delete(key)
        return removed

    def _is_over(self, prefix: str) -> bool:
        try:
            info = self._info(prefix)
        except ObjectNotFound:
            return True
        return info.expires_at is not None and info.expires_at <= time.time()

    def _info(self, prefix: str) -> FileInfo:
        """Raises ObjectNotFound, NewerSchema."""
        key = f"{prefix}file.json"
        with FILE.reading(key):
            return FileInfo.model_validate(FILE.unstamped(json.loads(self._store.get(key).data), key))

    def _remove(self, prefix: str) -> None:
        self._store.delete(f"{prefix}file.json")
        self._store.delete_prefix(prefix)

    def _prefix(self, owner: str, file_id: str) -> str:
        return f"{_ROOT}/{key_of(owner)}/{file_id}/"

    def _expiry(self, at: int, owner: str, file_id: str) -> str:
        return f"{_EXPIRY}/{at:012d}/{key_of(owner)}/{file_id}"


def _pieces(content: Iterable[bytes]) -> Iterator[bytes]:
    """The content in pieces of PIECE_BYTES, the last one shorter."""
    waiting = bytearray()
    for block in content:
        waiting += block
        while len(waiting) >= PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    if waiting:
        yield bytes(waiting)


def _missing(file_id: str) -> NotFound:
    return NotFound(f"no such file: {file_id[:80]!r}", param="file_id")
