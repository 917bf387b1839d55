"""An entry as bytes."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv_offload import entry_format as headers
from services.engine.kv_offload.entry_format import (
    Header,
    HeaderRejected,
    decode,
    encode,
    entry_bytes,
    header_bytes,
    header_length,
)
from services.engine.kv_offload.messages import Entry
from tests.unit.engine.kv_offload.toy_device import LAYOUT, chain


def header(entry: Entry) -> Header:
    count = entry.num_blocks(LAYOUT.block_size) + 1
    return Header(entry, np.arange(count, dtype=np.int64) * 7**20 - 2**62)


DATA = encode(header(chain(5, 6)[1]), LAYOUT)
"""Entry with a parent."""


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=3), seconds=st.floats(0, 1e6))
def test_round_trip(lengths: list[int], seconds: float) -> None:
    entry = chain(*lengths, seconds=seconds)[-1]
    data = encode(header(entry), LAYOUT)
    assert len(data) == header_bytes(entry, LAYOUT) == header_length(data[:16])
    assert len(data) % 4096 == 0
    assert entry_bytes(entry, LAYOUT) == len(data) + LAYOUT.payload_bytes(entry)
    for read in (decode(data, LAYOUT), decode(data + b"payload", LAYOUT)):
        assert read.entry == entry
        assert np.array_equal(read.checksums, header(entry).checksums)


@given(place=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(place: int, bit: int) -> None:
    data = bytearray(DATA)
    data[place] ^= 1 << bit
    with pytest.raises(HeaderRejected):
        decode(bytes(data), LAYOUT)


@given(st.integers(0, len(DATA) - 1))
def test_any_truncation_is_found(length: int) -> None:
    with pytest.raises(HeaderRejected):
        decode(DATA[:length], LAYOUT)


@given(st.binary(max_size=300))
def test_anything_else_is_no_header(data: bytes) -> None:
    for begin in (b"", b"TEMPERKV", DATA[:12], DATA[:16]):
        with pytest.raises(HeaderRejected):
            decode(begin + data, LAYOUT)


@pytest.mark.parametrize("change", [{"fingerprint": "x"}, {"block_size": 8}, {"block_bytes": 8}, {"slot_bytes": 8}])
def test_of_another_layout(change: dict[str, object]) -> None:
    with pytest.raises(HeaderRejected, match="another model"):
        decode(DATA, dataclasses.replace(LAYOUT, **change))  # type: ignore[arg-type]


def test_another_version_is_named() -> None:
    data = DATA[:8] + struct.pack("<I", 7) + DATA[12:]
    with pytest.raises(HeaderRejected, match="format version 7 of a later release, this engine reads 1"):
        decode(data, LAYOUT)


@pytest.mark.parametrize("length", [0, 4095, 4096 * 3, 2**27, 2**32 - 4096])
def test_impossible_lengths_are_not_trusted(length: int) -> None:
    data = DATA[:12] + struct.pack("<I", length) + DATA[16:]
    with pytest.raises(HeaderRejected):
        decode(data, LAYOUT)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (4, b"k" * 20),
        (5, 0),
        (5, 2),
        (6, b"p" * 20),
        (8, 0),
        (8, 6),
        (8, 2**63),
        (9, 12),
        (9, 2**64 - 1),
        (9, 5),
        (10, float("nan")),
        (10, -1.0),
        (10, float("inf")),
        (10, 1e7),
        (11, 0),
        (11, 2**60),
        (12, 4),
        (12, 2**61),
    ],
)
def test_contradictions_under_a_right_digest(place: int, value: object) -> None:
    """A header with a valid digest may still contradict itself; every field is checked."""
    fields = list(headers._FIXED.unpack_from(DATA))
    fields[place] = value
    covered = headers._FIXED.pack(*fields) + DATA[headers._FIXED.size : -32]
    with pytest.raises(HeaderRejected):
        decode(covered + headers._digest(covered), LAYOUT)


def test_bytes_where_there_are_none_are_refused() -> None:
    covered = DATA[:-33] + b"x"
    with pytest.raises(HeaderRejected, match="the padding is not zero"):
        decode(covered + headers._digest(covered), LAYOUT)
