"""Export and import of the entries of a session file, on threads that may wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidRequest, NotFound, Unavailable
from services.engine.kv_cache.keys import Key
from services.engine.kv_offload.background_copies import Fetcher
from services.engine.kv_offload.entry_format import (
    PREFIX_BYTES,
    WORD,
    Header,
    HeaderRejected,
    checksum,
    decode,
    encode,
    header_length,
    spans,
    weights,
)
from services.engine.kv_offload.index import Buffer, Index, Record
from services.engine.kv_offload.messages import Bytes, Entry

PIECE_BYTES = 2**20
_FETCH_SECONDS = 60.0
_UNSUPPORTED = "the parent of an entry of the session is missing"
_CHUNK_BYTES = 2**18
"""Bytes that are summed at once, a multiple of WORD: they stay in a core's cache."""


class EntryExchange:
    """Export and import of single entries. Thread-safe; every method blocks.

    Args:
        taken: called, under the index's lock, with an entry whose bytes are in the arena; it copies them to lower
            tiers.
    """

    def __init__(self, index: Index, fetcher: Fetcher, taken: Callable[[Record, Buffer], None]) -> None:
        self._index = index
        self._fetcher = fetcher
        self._taken = taken
        self._weights = np.empty(0, np.int64)
        """Weights of the checksums; made on first use."""

    def export_entry(self, key: Key) -> Iterator[bytes]:
        """Exports an entry as header and payload, in pieces of at most PIECE_BYTES. The entry stays in memory until the
        last piece is taken or the iterator is closed.

        Raises, before the first piece:
            NotFound: no tier has it.
            Unavailable: it could not be read, or is damaged.
        """
        index = self._index
        with index.lock:
            record = index.find(key)
        if record is None:
            raise NotFound("no tier has this entry any more")
        buffer = self._fetcher.fetch(record, time.monotonic() + _FETCH_SECONDS)
        if buffer is None:
            raise Unavailable("an entry of the prefix cache could not be read; the engine's log says why")
        try:
            if not np.array_equal(self._sums(record.entry, buffer), buffer.checksums):
                with index.lock:
                    index.spoil(record, buffer)
                raise Unavailable("an entry of the prefix cache is damaged")
        except BaseException:
            self._release(record, buffer)
            raise
        return self._pieces(record, buffer)

    def import_entry(self, pieces: Iterable[bytes]) -> Entry:
        """Imports exactly one entry, in pieces of any size; its parent must be there.

        Raises:
            InvalidRequest: it is damaged, or of another model or configuration.
            Unavailable: there is no room for it.
        """
        source = _Source(pieces)
        try:
            prefix = source.take(PREFIX_BYTES)
            header = decode(prefix + source.take(header_length(prefix) - PREFIX_BYTES), self._index.layout)
        except HeaderRejected as error:
            raise InvalidRequest(f"an entry of the session cannot be used: {error}") from error
        index, entry = self._index, header.entry
        size = index.layout.payload_bytes(entry)
        with index.lock:
            record = index.expect(entry)
        if record is None:
            raise InvalidRequest(_UNSUPPORTED)
        try:
            with index.lock:
                buffer = self._new_buffer(record, size)
            if buffer is None:
                source.skip(size)
                source.end()
            else:
                self._fill(record, buffer, header, source)
        finally:
            with index.lock:
                index.unclaim(record)
        return entry

    def _new_buffer(self, record: Record, size: int) -> Buffer | None:
        """Buffer for an imported entry; None: a copy is there already."""
        if record.tiers or record.buffer is not None:
            return None
        if not self._index.stands(record):
            raise InvalidRequest(_UNSUPPORTED)
        run = self._index.take_room(size)
        if run is None:
            raise Unavailable(f"no room for {size:,} bytes in the host's memory (TEMPER_TIER_HOST_BYTES)")
        buffer = self._index.new_buffer(record)
        buffer.run = run
        return buffer

    def _fill(self, record: Record, buffer: Buffer, header: Header, source: _Source) -> None:
        index = self._index
        try:
            if buffer.run is not None:
                source.read_into(index.arena.pieces(buffer.run))
            source.end()
            if not np.array_equal(self._sums(header.entry, buffer), header.checksums):
                raise InvalidRequest("an entry of the session is damaged: its checksums do not match its bytes")
        except BaseException:
            with index.lock:
                index.failed(record, buffer)
            raise
        with index.lock:
            index.ready(record, buffer, header.checksums, None)
            if index.is_live(record):
                self._taken(record, buffer)
            index.release(record, buffer)

    def _sums(self, entry: Entry, buffer: Buffer) -> npt.NDArray[np.int64]:
        """[blocks + 1] checksums of the bytes in a buffer."""
        layout, arena = self._index.layout, self._index.arena
        if buffer.run is None:
            raise RuntimeError("a buffer without memory is read")
        blocks = entry.num_blocks(layout.block_size)
        if not len(self._weights):
            self._weights = weights(max(layout.block_bytes, layout.slot_bytes) // WORD)
        weight = self._weights
        sums = [
            _sum(portion, weight)
            for _, portion in spans(arena.pieces(buffer.run, 0, blocks * layout.block_bytes), layout.block_bytes)
        ]
        state = [piece.data for piece in arena.pieces(buffer.run, blocks * layout.block_bytes)]
        return np.array([*sums, _sum(state, weight)], np.int64)

    def _pieces(self, record: Record, buffer: Buffer) -> Iterator[bytes]:
        try:
            header = encode(Header(record.entry, buffer.checksums), self._index.layout)
            for start in range(0, len(header), PIECE_BYTES):
                yield header[start : start + PIECE_BYTES]
            if buffer.run is not None:
                for _, portion in spans(self._index.arena.pieces(buffer.run), PIECE_BYTES):
                    yield b"".join(portion)
        finally:
            self._release(record, buffer)

    def _release(self, record: Record, buffer: Buffer) -> None:
        with self._index.lock:
            self._index.release(record, buffer)


class _Source:
    """Reads pieces of bytes in portions of other sizes. Raises InvalidRequest if they end too early."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self._next(size - len(data))
        return bytes(data)

    def read_into(self, target: Iterable[Bytes]) -> None:
        for piece in target:
            view = piece.data
            while view:
                part = self._next(len(view))
                view[: len(part)] = part
                view = view[len(part) :]

    def skip(self, size: int) -> None:
        while size:
            size -= len(self._next(size))

    def end(self) -> None:
        """Raises InvalidRequest if there are more bytes."""
        if self._rest or any(self._pieces):
            raise InvalidRequest("an entry of the session is longer than its header says")

    def _next(self, most: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                raise InvalidRequest("an entry of the session is truncated")
            self._rest = memoryview(piece)
        part, self._rest = self._rest[:most], self._rest[most:]
        return part


def _sum(portion: Iterable[memoryview], weight: npt.NDArray[np.int64]) -> int:
    """Checksum of memory pieces that follow each other."""
    data = [np.frombuffer(view, np.uint8) for view in portion]
    whole = data[0] if len(data) == 1 else np.concatenate(data)
    step = _CHUNK_BYTES // WORD
    total = sum(
        checksum(whole[start * WORD : (start + step) * WORD], weight[start:])
        for start in range(0, len(whole) // WORD, step)
    )
    return (total + 2**63) % 2**64 - 2**63
