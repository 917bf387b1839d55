"""Results of a batch while it runs: numbered parts in the object store, which are the truth about what is done.

A part is created only if its number is free. Two gateways that both believe they own a batch therefore cannot both
write part n: the later one sees what the earlier wrote, or that it has lost the batch. A line of a part is
`{line number} {kind} {JSON of the result}`; the numbers tell what is done, the kinds which file a result goes to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from services.common.storage.object_store import ObjectStore

ROOT = "batches/"
Kind = Literal["o", "e", "c", "x"]
"""Output or error; and of message batches: canceled or expired before it ran."""


@dataclass(slots=True)
class Done:
    """What the parts of a batch hold."""

    lines: set[int] = field(default_factory=set)
    kinds: Counter[Kind] = field(default_factory=Counter)
    """How many results of each there are."""
    parts: int = 0

    def add(self, number: int, kind: Kind) -> None:
        """One more result."""
        self.lines.add(number)
        self.kinds[kind] += 1


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one request."""

    number: int
    kind: Kind
    json: bytes
    """One line of the output or error file, without its end."""

    def encode(self) -> bytes:
        return b"%d %s %s\n" % (self.number, self.kind.encode(), self.json)


class Parts:
    """The parts of one batch. Every method blocks and may raise Unavailable."""

    def __init__(self, store: ObjectStore, batch_id: str) -> None:
        self._store = store
        self._prefix = f"{ROOT}{batch_id}/"

    def read(self, done: Done) -> None:
        """Adds the parts that ``done`` does not know yet."""
        for number in range(done.parts, len(self._store.list(self._prefix))):
            for line, kind, _ in self._results(number):
                done.add(line, cast(Kind, kind.decode()))
            done.parts = number + 1

    def write(self, number: int, data: bytes) -> None:
        """Raises PreconditionFailed: there is such a part."""
        self._store.put(self._key(number), data, if_absent=True)

    def content(self, kinds: Sequence[Kind], parts: int) -> Iterator[bytes]:
        """The results of some kinds in the first ``parts`` parts, one block a part."""
        wanted = {kind.encode() for kind in kinds}
        for number in range(parts):
            yield b"".join(result + b"\n" for _, found, result in self._results(number) if found in wanted)

    def discard(self) -> None:
        """Removes all."""
        self._store.delete_prefix(self._prefix)

    def _results(self, number: int) -> Iterator[tuple[int, bytes, bytes]]:
        for text in self._store.get(self._key(number)).data.split(b"\n")[:-1]:
            line, kind, result = text.split(b" ", 2)
            yield int(line), kind, result

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:06d}"
