"""Immutable versions of named things in the object store, numbered by conditional writes; their lines lie in pieces.

Layout, below a root of each kind of thing:
    {root}{name}/{n:08d}/claim             who took this number (If-None-Match); stays when the version is deleted: a
                                           number never means something else
    {root}{name}/{n:08d}/{lines}-{000000}  lines of JSON, in pieces
    {root}{name}/{n:08d}/{manifest}        the manifest, written last (If-None-Match) and removed first: the version
                                           exists while this does
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import Field

from services.common.errors import NotFound, Unavailable
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.common.storage.record_versions import Schema
from services.common.validation.strict_models import StrictModel

PIECE_LINES = 512
PIECE_BYTES = 4 * 2**20
_LOCK_SECONDS = 120.0
"""Time after which who holds a lock counts as dead, by the clock of the store; changing a version takes seconds."""
_RACES = 64
"""Numbers that others may take while one is looked for."""


class Piece(StrictModel):
    """Object with consecutive items: JSONL."""

    items: int = Field(ge=1)
    sha256: str


def pieces_of(lines: Iterable[bytes]) -> list[tuple[Piece, bytes]]:
    """Lines in pieces of bounded size, each with its entry of the manifest."""
    place = [0, 0, 0]  # piece, items in it, bytes in it

    def piece(line: bytes) -> int:
        number, items, size = place
        if items and (items == PIECE_LINES or size + len(line) > PIECE_BYTES):
            number, items, size = number + 1, 0, 0
        place[:] = number, items + 1, size + len(line)
        return number

    found = []
    for _, group in groupby(lines, key=piece):
        several = list(group)
        data = b"".join(several)
        found.append((Piece(items=len(several), sha256=hashlib.sha256(data).hexdigest()), data))
    return found


@dataclass(frozen=True, slots=True)
class VersionedObjects:
    """Versions of one kind of thing. Thread-safe and blocking; Unavailable when the object store is away.

    Args:
        noun: what one is called in messages, and the field at fault.
        root: prefix of all keys.
        manifest: name of the object of a manifest.
        schema: of the manifests.
    """

    store: ObjectStore
    noun: str
    root: str
    manifest: str
    schema: Schema

    def newest(self) -> list[tuple[str, int]]:
        """Name and number of the newest version of each, by name."""
        numbers: dict[str, int] = {}
        for name, number in self._existing(self.root):
            numbers[name] = max(number, numbers.get(name, 0))
        return sorted(numbers.items())

    def numbers(self, name: str) -> list[int]:
        """Numbers of the versions of a name in ascending order; empty if there is none."""
        return sorted(number for _, number in self._existing(f"{self.root}{name}/"))

    def read(self, name: str, number: int) -> Mapping[str, Any] | None:
        """A manifest as it was written; None: there is no such version. Raises NewerSchema."""
        try:
            record = json.loads(self.store.get(self._manifest_key(name, number)).data)
        except ObjectNotFound:
            return None
        return self.schema.unstamped(record, f"{self.noun} {name}@{number}")

    def key_id(self, name: str, number: int) -> str | None:
        """The `key_id` of a manifest, whatever else is in it; None: it has none, or there is no such version."""
        try:
            found = json.loads(self.store.get(self._manifest_key(name, number)).data).get("key_id")
        except ObjectNotFound:
            return None
        return found if isinstance(found, str) else None

    def claim(self, name: str, purpose: str = "") -> int:
        """The next free number, which is this writer's from here on. Concurrent writers get distinct ones.

        Args:
            purpose: writers for the same one, one after another or at once, get the same number; empty: of its own.
        """
        taken = [int(part) for part in self.store.list_dirs(f"{self.root}{name}/") if part.isdigit()]
        claim = purpose.encode() or uuid.uuid4().hex.encode()
        first = max(taken, default=0) + 1
        if purpose and taken and self._claimed(name, first - 1) == claim:
            return first - 1
        for number in range(first, first + _RACES):
            try:
                self.store.put(f"{self.prefix(name, number)}claim", claim, if_absent=True)
            except PreconditionFailed:
                if not purpose or self._claimed(name, number) != claim:
                    continue
            return number
        raise Unavailable(f"too many others make versions of {self.noun} {name!r} at once; retry")

    def _claimed(self, name: str, number: int) -> bytes:
        try:
            return self.store.get(f"{self.prefix(name, number)}claim").data
        except ObjectNotFound:
            return b""

    def publish(self, name: str, number: int, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, once everything else is there."""
        record = json.dumps(self.schema.stamped(manifest)).encode()
        self.store.put(self._manifest_key(name, number), record, if_absent=True)

    def republish(self, name: str, number: int, manifest: Mapping[str, Any], *, before: Mapping[str, Any]) -> bool:
        """Writes another manifest in the place of ``before``; False: that is not what is there any more."""
        key = self._manifest_key(name, number)
        try:
            stored = self.store.get(key)
            if json.loads(stored.data) != self.schema.stamped(before):
                return False
            self.store.put(key, json.dumps(self.schema.stamped(manifest)).encode(), if_match=stored.etag)
        except (ObjectNotFound, PreconditionFailed):
            return False
        return True

    def unpublish(self, name: str, number: int) -> None:
        """Removes the manifest: the version does not exist any more, and its lines can go."""
        self.store.delete(self._manifest_key(name, number))

    def write_piece(self, name: str, number: int, lines: str, index: int, data: bytes) -> None:
        """Writes a piece of what is called ``lines``."""
        self.store.put(self._piece_key(name, number, lines, index), data)

    def delete_piece(self, name: str, number: int, lines: str, index: int) -> None:
        """Removes a piece."""
        self.store.delete(self._piece_key(name, number, lines, index))

    def keep_pieces(self, name: str, number: int, lines: Collection[str]) -> None:
        """Removes all pieces of a version but those of what is called one of ``lines``."""
        prefix = self.prefix(name, number)
        for key in self.store.list(prefix):
            called, dash, index = key.removeprefix(prefix).rpartition("-")
            if dash and index.isdigit() and called not in lines:
                self.store.delete(key)

    def lines(
        self, name: str, number: int, lines: str, pieces: Sequence[Piece], start: int = 0, limit: int | None = None
    ) -> Iterator[bytes]:
        """Lines of a version in their order.

        Args:
            start: index of the first one.
            limit: most of them; None: all that follow.

        Raises:
            NotFound: the version was deleted meanwhile.
            Unavailable: the store has other lines than were written.
        """
        end = None if limit is None else start + limit
        first = 0
        for index, piece in enumerate(pieces):
            if (end is None or first < end) and first + piece.items > start:
                data = self._piece(name, number, lines, index, piece)
                yield from data.splitlines()[max(0, start - first) : None if end is None else end - first]
            first += piece.items

    @contextmanager
    def locked(self, name: str, number: int) -> Iterator[None]:
        """Keeps others from changing what a version has. A lock whose holder has died is free after some minutes.

        Raises:
            Unavailable: somebody else has it.
        """
        # The time is for earlier releases, which read it.
        key, mine = f"{self.prefix(name, number)}lock", f"{time.time():.3f} {uuid.uuid4().hex}".encode()
        try:
            self.store.put(key, mine, if_absent=True)
        except PreconditionFailed:
            self._take_over(key, mine, f"{self.noun} {name}@{number}")
        try:
            yield
        finally:
            self.store.delete(key)

    def _take_over(self, key: str, mine: bytes, what: str) -> None:
        try:
            held = self.store.written(key)
            left = _LOCK_SECONDS - held.age
            if left <= 0:
                self.store.put(key, mine, if_match=held.etag)
                return
        except (ObjectNotFound, PreconditionFailed):
            left = 1.0
        raise Unavailable(f"{what} is being changed by somebody else; retry", retry_after=max(left, 1.0))

    def missing(self, name: str, number: int) -> NotFound:
        """The error for a version that does not exist."""
        message = f"{self.noun} version {name}@{number} does not exist, or does not any more"
        return NotFound(message, param=self.noun)

    def prefix(self, name: str, number: int) -> str:
        """Prefix of all keys of a version."""
        return f"{self.root}{name}/{number:08d}/"

    def _piece(self, name: str, number: int, lines: str, index: int, piece: Piece) -> bytes:
        try:
            data = self.store.get(self._piece_key(name, number, lines, index)).data
        except ObjectNotFound as error:
            raise self.missing(name, number) from error
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise Unavailable(
                f"{self.noun} {name}@{number}: its {lines} in the object store are not those that were written"
            )
        return data

    def _existing(self, prefix: str) -> list[tuple[str, int]]:
        """Name and number of the versions whose manifests lie below a prefix."""
        found = []
        for key in self.store.list(prefix):
            name, number, *rest = key.removeprefix(self.root).split("/")
            if rest == [self.manifest]:
                found.append((name, int(number)))
        return found

    def _manifest_key(self, name: str, number: int) -> str:
        return f"{self.prefix(name, number)}{self.manifest}"

    def _piece_key(self, name: str, number: int, lines: str, index: int) -> str:
        return f"{self.prefix(name, number)}{lines}-{index:06d}"
