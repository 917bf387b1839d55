"""Reading safetensors from memory: what the library reads, without copying it, and nothing that it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from services.engine.models.weights.tensor_file import read_tensors


def file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2).half(),
        "d": torch.tensor(3),
        "e": torch.empty(0, 4),
    }
    data = save(tensors, metadata={"format": "pt"})
    read = read_tensors(data)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_nothing_is_copied() -> None:
    data = save({"a": torch.randn(64)})
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert read_tensors(data)["a"].untyped_storage().nbytes() == whole.numel()


@pytest.mark.parametrize("padding", range(4))
def test_data_may_begin_anywhere(padding: int) -> None:
    values = torch.randn(6)
    text = json.dumps({"a": entry(0, 24)}).encode()
    data = file(text + b" " * (padding + (-len(text)) % 4), values.numpy().tobytes())
    assert torch.equal(read_tensors(data)["a"], values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 12,
        file(b"[]"),
        file(b"{", b""),
        file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', b"1234"),
        file({"a": 3}),
        file({"a": entry(0, 8)}, b"1234"),
        file({"a": entry(0, 4)}, b"12345678"),
        file({"a": entry(4, 8)}, b"12345678"),
        file({"a": entry(0, 8), "b": entry(4, 12)}, b"123456789012"),
        file({"a": entry(0, 8, [3])}, b"12345678"),
        file({"a": entry(0, 8, [-2])}, b"12345678"),
        file({"a": entry(0, 8, [2.0])}, b"12345678"),
        file({"a": entry(0, 8, [True, 2])}, b"12345678"),
        file({"a": entry(0, 8, dtype="X")}, b"12345678"),
        file({"a": {"dtype": "F32", "shape": [2]}}, b"12345678"),
        file(b"\xff\xfe"),
    ],
)
def test_malformed_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_tensors(data)


_GOOD = save({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)})


@given(st.integers(0, len(_GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_is_never_read_as_something_else_than_the_library_does(place: int, value: int) -> None:
    data = _GOOD[:place] + bytes([value]) + _GOOD[place + 1 :]
    try:
        read = read_tensors(data)
    except ValueError:
        return
    expected = load(data)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].numpy().tobytes() == tensor.numpy().tobytes()
