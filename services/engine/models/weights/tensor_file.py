"""Tensors of a safetensors file in memory, as views of its bytes.

safetensors.torch.load() copies every tensor while it holds the interpreter's lock: 30 ms for an adapter of 130 MB, in
which no step is launched and no token leaves. Nothing is copied here.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Name → tensor. The tensors must not be written to.

    Layout: github.com/huggingface/safetensors#format. The whole of the data must belong to exactly one tensor each.

    Raises:
        ValueError: the file is not of that layout, or a tensor has a dtype that no weights have.
    """
    header, begin = _header(data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        everything = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    # One operator a tensor: each hands over the interpreter's lock.
    whole = {dtype: everything[: len(data) - len(data) % dtype.itemsize].view(dtype) for dtype in _DTYPES.values()}
    tensors: dict[str, Tensor] = {}
    at = 0
    for (start, end), name in sorted((_offsets(name, entry), name) for name, entry in header.items()):
        entry = header[name]
        dtype, shape = _DTYPES.get(str(entry.get("dtype"))), entry.get("shape")
        if dtype is None:
            raise ValueError(f"tensor {name} has the dtype {entry.get('dtype')!r}")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"tensor {name} has the shape {shape!r}")
        if start != at or end - start != math.prod(shape) * dtype.itemsize or begin + end > len(data):
            raise ValueError(f"tensor {name} does not lie where the header says")
        if (begin + start) % dtype.itemsize:
            tensors[name] = everything[begin + start : begin + end].clone().view(dtype).view(shape)
        else:
            steps = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
            tensors[name] = whole[dtype].as_strided(shape, steps, (begin + start) // dtype.itemsize)
        at = end
    if begin + at != len(data):
        raise ValueError(f"{len(data) - begin - at} bytes belong to no tensor")
    return tensors


def header_end(data: bytes) -> int:
    """Length that a file's header says it has; the file itself may be shorter."""
    return _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")


def _header(data: bytes) -> tuple[dict[str, dict[str, Any]], int]:
    """Entries of the tensors, and where the data begins."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"its header has {next(name for name in names if names.count(name) > 1)} twice")
        return table

    begin = header_end(data)
    if len(data) < _LENGTH_BYTES or begin > len(data):
        raise ValueError("it ends within its header")
    header = json.loads(data[_LENGTH_BYTES:begin], object_pairs_hook=unique)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    header.pop("__metadata__", None)
    if not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("its header has an entry that is no tensor")
    return header, begin


def _offsets(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int and o >= 0 for o in offsets):
        raise ValueError(f"tensor {name} has the offsets {offsets!r}")
    return offsets[0], offsets[1]
