"""Format of an entry as bytes: a header and, behind it, the payload. Files of the disk tier, objects in the store and
the entries of an exported session all have it.

The header is a whole number of pages:
    fixed       magic, version, length of the header, digest of the layout, key, parent, namespace, start, end, seconds,
                length of the payload, number of checksums; little-endian
    tokens      uint32 each
    checksums   int64 each: of every block, then of the state
    zeros       to the last 32 bytes of its last page
    digest      BLAKE2b of all that is before
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.kv_cache.keys import KEY_BYTES, TOKEN_BYTES, Key, Namespace
from services.engine.kv_offload.messages import Bytes, Entry, Layout

MAGIC = b"TEMPERKV"
VERSION = 1
PAGE = 4096
"""Bytes of a page; the payload begins at a multiple."""
MOST_BYTES = 64 * 2**20
"""Longest header in bytes: that of an entry of some ten million tokens."""
MOST_SECONDS = 1e6
"""Longest time to compute an entry that a header may state: more would let it stay for ever."""
_DIGEST = 32
_FIXED = struct.Struct(f"<8sII{_DIGEST}s{KEY_BYTES}sB{KEY_BYTES}s{KEY_BYTES}sQQdQQ")
_PREFIX = struct.Struct("<8sII")
PREFIX_BYTES = _PREFIX.size
"""Bytes that header_length needs."""


class HeaderRejected(Exception):
    """The bytes are no entry that this engine can use; the message says why."""


class NewerFormat(HeaderRejected):
    """A later release wrote them."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of an entry: everything but its payload."""

    entry: Entry
    checksums: npt.NDArray[np.int64]
    """[blocks + 1] checksums: of each block, then of the state."""


def header_bytes(entry: Entry, layout: Layout) -> int:
    """Length of an entry's header, bytes."""
    return _length(len(entry.tokens), entry.num_blocks(layout.block_size) + 1)


def entry_bytes(entry: Entry, layout: Layout) -> int:
    """Length of an entry's header and payload, bytes."""
    return header_bytes(entry, layout) + layout.payload_bytes(entry)


def encode(header: Header, layout: Layout) -> bytes:
    """Encodes a header."""
    entry, checksums = header.entry, header.checksums
    length = _length(len(entry.tokens), len(checksums))
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        length,
        _layout_digest(layout),
        entry.key,
        entry.parent is not None,
        entry.parent or bytes(KEY_BYTES),
        entry.namespace,
        entry.start,
        entry.end,
        entry.seconds,
        layout.payload_bytes(entry),
        len(checksums),
    )
    data = b"".join((fixed, entry.tokens, checksums.astype("<i8").tobytes()))
    data = data.ljust(length - _DIGEST, b"\0")
    return data + _digest(data)


def header_length(prefix: bytes) -> int:
    """Length of the header that begins with these PREFIX_BYTES or more.

    Raises:
        HeaderRejected: the bytes are no header, or an impossible one.
    """
    if len(prefix) < PREFIX_BYTES:
        raise HeaderRejected(f"truncated: {len(prefix)} bytes of a header")
    magic, version, length = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise HeaderRejected("it does not begin like an entry")
    if version > VERSION:
        raise NewerFormat(f"format version {version} of a later release, this engine reads {VERSION}")
    if version != VERSION:
        raise HeaderRejected(f"format version {version}, this engine reads {VERSION}")
    if not _FIXED.size + _DIGEST <= length <= MOST_BYTES or length % PAGE:
        raise HeaderRejected(f"impossible length of {length} bytes")
    return int(length)


def decode(data: bytes, layout: Layout) -> Header:
    """Decodes the header that these bytes begin with.

    Raises:
        HeaderRejected: it is truncated, damaged, of another version or of another layout.
    """
    length = header_length(data)
    if len(data) < length:
        raise HeaderRejected(f"truncated: {len(data)} of {length} bytes of a header")
    covered = data[: length - _DIGEST]
    if _digest(covered) != data[length - _DIGEST : length]:
        raise HeaderRejected("damaged: the digest of the header does not match")
    (_, _, _, made_for, key, has_parent, parent, namespace, start, end, seconds, payload, checksums) = (
        _FIXED.unpack_from(covered)
    )
    if made_for != _layout_digest(layout):
        raise HeaderRejected("it belongs to another model or configuration")
    tokens = TOKEN_BYTES * (end - start)
    if not 0 <= start < end or checksums > MOST_BYTES or _length(tokens, checksums) != length:
        raise HeaderRejected(f"contradicts itself: tokens {start} to {end}, {checksums} checksums, {length} bytes")
    if has_parent > 1 or not 0 <= seconds <= MOST_SECONDS or (not has_parent and any(parent)):
        raise HeaderRejected("contradicts itself: malformed fields")
    body = _FIXED.size
    if any(covered[body + tokens + 8 * checksums :]):
        raise HeaderRejected("contradicts itself: the padding is not zero")
    try:
        entry = Entry(
            Key(key),
            Key(parent) if has_parent else None,
            Namespace(namespace),
            start,
            end,
            covered[body : body + tokens],
            seconds,
        )
    except ValueError as error:
        raise HeaderRejected(f"contradicts itself: {error}") from error
    if payload != layout.payload_bytes(entry) or checksums != entry.num_blocks(layout.block_size) + 1:
        raise HeaderRejected(f"contradicts itself: a payload of {payload} bytes with {checksums} checksums")
    found = np.frombuffer(covered, "<i8", checksums, body + tokens).astype(np.int64)
    return Header(entry, found)


def _length(tokens: int, checksums: int) -> int:
    return -(-(_FIXED.size + tokens + 8 * checksums + _DIGEST) // PAGE) * PAGE


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST, person=b"temper header").digest()


def _layout_digest(layout: Layout) -> bytes:
    shape = f"{layout.block_size}:{layout.block_bytes}:{layout.slot_bytes}:{layout.fingerprint}"
    return hashlib.blake2b(shape.encode(), digest_size=_DIGEST, person=b"temper layout").digest()


def spans(pieces: Sequence[Bytes], most: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Splits pieces of memory into portions of at most ``most`` bytes, given as (offset, memory); a portion may span
    several pieces."""
    offset = length = 0
    portion: list[memoryview] = []
    for piece in pieces:
        view = piece.data
        while view:
            part = view[: most - length]
            portion.append(part)
            length += len(part)
            view = view[len(part) :]
            if length == most:
                yield offset, portion
                offset, length, portion = offset + length, 0, []
    if portion:
        yield offset, portion


WORD = 8
"""Bytes of a word; checksummed data is a whole number of words."""


_GAMMA = 0x9E3779B97F4A7C15


_FIRST = 0xBF58476D1CE4E5B9


_SECOND = 0x94D049BB133111EB


def weights(words: int) -> npt.NDArray[np.int64]:
    """[words] weights of the checksum: SplitMix64 (Steele, Lea & Flood 2014) from 1 on, made odd."""
    z = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def checksum(data: Bytes, weight: npt.NDArray[np.int64]) -> int:
    """Checksum of [WORD · n] contiguous bytes under the first n weights: Σ wᵢ xᵢ mod 2⁶⁴, between -2⁶³ and 2⁶³ - 1.

    It is a multilinear hash over 64-bit words with odd weights (Lemire & Kaser, Strongly universal string hashing is
    fast, arXiv 1202.4961). It detects any change of one word; a swap, a shift or a wrong page goes unnoticed with a
    probability of about 2⁻⁶³. It suits devices: one multiplication and one addition for each word, in any order.
    """
    words = data.view(np.int64)
    return int((words * weight[: len(words)]).sum(dtype=np.int64))
