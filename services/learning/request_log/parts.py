"""Parts of the request log in the object store: JSON lines, each part written once, whole.

    requests/{yyyymmdd}/{ulid}.jsonl

The ulid says when the first request of the part ended, the day is that moment's in UTC. A line is taken out by writing
blanks over it, so that the places of the others stay true, and so that a part that is written again (its writer died in
between) stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from services.common.errors import Unavailable
from services.common.storage.ids import milliseconds_of, ulid
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed

ROOT: Final = "requests/"
_SLACK_SECONDS = 120.0
"""Time from the first request of a part to its last, and between clocks of gateways, at most."""
_RACES = 16
_WHOLE_FROM = 4
"""Lines from which on a part is read whole: a request costs the time of some 100 kB."""


@dataclass(frozen=True, slots=True)
class Line:
    """Place of a request in a part."""

    part: str
    """"yyyymmdd/ulid"."""
    offset: int
    length: int
    """Bytes, without the line's end."""

    def __str__(self) -> str:
        return f"{self.part} {self.offset} {self.length}"

    @classmethod
    def parse(cls, text: str) -> Line:
        part, offset, length = text.split(" ")
        return cls(part, int(offset), int(length))


def part_name(began: float) -> str:
    """Name of a new part whose first request ended at ``began`` (unix seconds)."""
    return f"{_day(began)}/{ulid(int(began * 1000))}"


def part_began(part: str) -> float:
    """Unix seconds at which the first request of a part ended."""
    return milliseconds_of(part.rpartition("/")[2]) / 1000


def lines_of(part: str, data: bytes) -> Iterator[tuple[Line, bytes]]:
    """The lines of a part that were not taken out, with their places."""
    offset = 0
    for line in data.split(b"\n"):
        if line.strip():
            yield Line(part, offset, len(line)), line
        offset += len(line) + 1


class Parts:
    """Reads and writes parts. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def write(self, part: str, data: bytes) -> None:
        """Writes a part, unless it is there."""
        with contextlib.suppress(PreconditionFailed):
            self.store.put(_key(part), data, if_absent=True)

    def read(self, lines: Sequence[Line]) -> dict[Line, bytes]:
        """Bytes of lines; those that were taken out, or whose part is gone, are left out. A part of which several
        are wanted is read as a whole."""
        found: dict[Line, bytes] = {}
        for part, those in _by_part(lines).items():
            if len(those) < _WHOLE_FROM:
                found |= {line: data for line in those if (data := self._line(line)) is not None}
            elif (whole := self.whole(part)) is not None:
                texts = {line: whole[line.offset : line.offset + line.length] for line in those}
                found |= {line: data for line, data in texts.items() if data.strip()}
        return found

    def _line(self, line: Line) -> bytes | None:
        buffer = bytearray(line.length)
        try:
            count = self.store.read_into(_key(line.part), line.offset, memoryview(buffer))
        except ObjectNotFound:
            return None
        return bytes(buffer) if count == line.length and buffer.strip() else None

    def whole(self, part: str) -> bytes | None:
        """All of a part; None: it is gone."""
        try:
            return self.store.get(_key(part)).data
        except ObjectNotFound:
            return None

    def between(self, since: float, until: float) -> Iterator[str]:
        """Names of the parts that may have requests that ended in this time (unix seconds), in the order of time."""
        first = ulid(int(max(since - _SLACK_SECONDS, 0) * 1000), 0)
        last = ulid(int((until + _SLACK_SECONDS) * 1000), 0)
        for day in self.store.list_dirs(ROOT):
            if _day(max(since - _SLACK_SECONDS, 0)) <= day <= _day(until + _SLACK_SECONDS):
                for key in self.store.list(f"{ROOT}{day}/"):
                    part = key.removeprefix(ROOT).removesuffix(".jsonl")
                    if first <= part.partition("/")[2] <= last:
                        yield part

    def take_out(self, lines: Sequence[Line]) -> None:
        """Writes blanks over lines."""
        for part, those in _by_part(lines).items():
            self._blank(part, those)

    def sweep(self, before: float) -> int:
        """Removes parts of days that ended before a moment (unix seconds); returns how many days."""
        days = [day for day in self.store.list_dirs(ROOT) if day < _day(before)]
        for day in days:
            self.store.delete_prefix(f"{ROOT}{day}/")
        return len(days)

    def _blank(self, part: str, lines: Sequence[Line]) -> None:
        for _ in range(_RACES):
            try:
                stored = self.store.get(_key(part))
            except ObjectNotFound:
                return
            data = bytearray(stored.data)
            for line in lines:
                data[line.offset : line.offset + line.length] = b" " * line.length
            try:
                if data != stored.data:
                    self.store.put(_key(part), bytes(data), if_match=stored.etag)
            except PreconditionFailed:
                continue
            return
        raise Unavailable(f"part {part} of the request log kept changing; retry")


def _by_part(lines: Sequence[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.part, []).append(line)
    return found


def _key(part: str) -> str:
    return f"{ROOT}{part}.jsonl"


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y%m%d")
