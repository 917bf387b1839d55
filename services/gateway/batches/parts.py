"""Results of a batch while it runs: numbered parts in the object store, which are the truth about what is done.

A part is created only if its number is free. Two gateways that both believe they own a batch therefore cannot both
write part n: the later one sees what the earlier wrote, or that it has lost the batch. A line of a part is
`{line number} {o|e} {JSON of the result}`; the numbers tell what is done, the letters which file a result goes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from services.common.store import ObjectStore

ROOT = "batches/"
Kind = Literal["o", "e"]
"""Output or error."""


@dataclass(slots=True)
class Done:
    """What the parts of a batch hold."""

    lines: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Of one request."""

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
                done.lines.add(line)
                done.completed += kind == b"o"
                done.failed += kind == b"e"
            done.parts = number + 1

    def write(self, number: int, data: bytes) -> None:
        """Raises PreconditionFailed: there is such a part."""
        self._store.put(self._key(number), data, if_absent=True)

    def content(self, kind: Kind, parts: int) -> Iterator[bytes]:
        """The results of one kind in the first ``parts`` parts, one block a part."""
        wanted = kind.encode()
        for number in range(parts):
            yield b"".join(result + b"\n" for _, found, result in self._results(number) if found == wanted)

    def discard(self) -> None:
        """Removes all."""
        self._store.delete_prefix(self._prefix)

    def _results(self, number: int) -> Iterator[tuple[int, bytes, bytes]]:
        for text in self._store.get(self._key(number)).data.split(b"\n")[:-1]:
            line, kind, result = text.split(b" ", 2)
            yield int(line), kind, result

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:06d}"
