"""File of an exported conversation session: a few facts, then the entries of its chain as the tiers write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import InvalidRequest

_MAGIC = b"TEMPERH1"
_MOST_FACTS = 2**20
_MOST_ENTRIES = 65536


class Facts(BaseModel):
    """Facts about the session at the beginning of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: str = Field(max_length=512)
    requests: int = Field(ge=0, lt=2**53)
    sizes: list[Annotated[int, Field(gt=0, lt=2**53)]] = Field(min_length=1, max_length=_MOST_ENTRIES)
    """Bytes of each entry."""


def write(facts: Facts, items: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Bytes of the file, in pieces no larger than those of the entries."""
    text = facts.model_dump_json().encode()
    yield _MAGIC + len(text).to_bytes(4, "little") + text
    for item in items:
        yield from item


class Reader:
    """Reads a session file from pieces of any size, from beginning to end.

    Raises:
        InvalidRequest: it is not a session file, or it ends too early.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._ahead = b""
        if self._take(len(_MAGIC)) != _MAGIC:
            raise InvalidRequest("the file is not an exported session of this version of Temper")
        length = int.from_bytes(self._take(4), "little")
        if length > _MOST_FACTS:
            raise InvalidRequest("the exported session is damaged: its facts are too long")
        try:
            self.facts = Facts.model_validate_json(self._take(length))
        except ValidationError as error:
            raise InvalidRequest("the exported session is damaged: its facts cannot be read") from error

    def entries(self) -> Iterator[Iterator[bytes]]:
        """Entries of the file; each must be read to its end before the next."""
        for size in self.facts.sizes:
            yield self._portion(size)
        if self._ahead or any(self._pieces):
            raise InvalidRequest("the exported session is longer than it says")

    def _portion(self, size: int) -> Iterator[bytes]:
        while size > 0:
            piece = self._ahead or next(self._pieces, None)
            if piece is None:
                raise InvalidRequest("the exported session is cut off")
            part, self._ahead = piece[:size], piece[size:]
            size -= len(part)
            yield part

    def _take(self, size: int) -> bytes:
        while len(self._ahead) < size:
            piece = next(self._pieces, None)
            if piece is None:
                raise InvalidRequest("the exported session is cut off")
            self._ahead += piece
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken
