"""A base checkpoint and an adapter into a checkpoint of its own, that transformers loads without PEFT.

Tensor by tensor: those without an adapter are copied as bytes from the mapped file, the others are W + scale · B A,
computed in float64 a few rows at a time. Names, order and everything beside the weights are the base checkpoint's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from services.adapter_tools.output import whole_directory
from services.common.errors import AdapterRejected, CheckpointRejected
from services.engine.models.checkpoint import canonical_name, checkpoint_digest, raw_tensors, shard_files
from services.engine.models.config import ModelConfig
from services.engine.models.lora.binding import BoundAdapter, BoundTarget, bind_adapter
from services.engine.models.registry import read_config
from services.engine.models.weights.shards import (
    SHARD_BYTES,
    Progress,
    TensorToWrite,
    bytes_needed,
    check_shard_bytes,
    companions,
    silent,
    write_checkpoint,
    write_json,
)

Keep: TypeAlias = Literal["base", "float32"]
RECORD = "temper_extract.json"
_HIGHEST_RANK = 2**16
_ENTRIES = 2**20
"""Entries of a matrix that are in float64 at once."""
_COPY_BYTES = 16 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the result."""

    name: str
    dtype: str
    """Type as safetensors writes it."""
    shape: tuple[int, ...]
    source: memoryview
    """The base's bytes."""
    source_dtype: str
    target: BoundTarget | None

    @property
    def size(self) -> int:
        return len(self.source) if self.dtype == self.source_dtype else 4 * math.prod(self.shape)


@dataclass(slots=True)
class Extraction:
    """What was written."""

    out: Path
    base_digest: str
    tensors: int = 0
    adapted: int = 0
    bytes: int = 0
    shards: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    """Layer → ‖what rounding to the checkpoint's dtype changed‖ / ‖the adapter's delta‖."""

    def summary(self) -> dict[str, Any]:
        """Summary for people and JSON."""
        worst = max(self.lost, key=lambda path: self.lost[path])
        return {
            "out": str(self.out),
            "base_digest": self.base_digest,
            "tensors": self.tensors,
            "adapted_layers": self.adapted,
            "bytes": self.bytes,
            "shards": self.shards,
            "rounding_max": self.lost[worst],
            "rounding_mean": sum(self.lost.values()) / len(self.lost),
            "rounding_worst_layer": worst,
        }


def extract(
    base: Path,
    files: Mapping[str, bytes],
    out: Path,
    *,
    base_digest: str | None,
    source: str,
    dtype: Keep = "base",
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Extraction:
    """Writes ``out`` with safetensors shards, their index, config.json and the tokenizer's files.

    Args:
        base: checkpoint directory that the adapter belongs to.
        files: the adapter's, either form of keys.
        base_digest: of the checkpoint that it was trained on; None: not known, only shapes are compared.
        source: the adapter's name, for the record.
        dtype: float32 keeps the whole delta where the base's own dtype would round it.
        max_shard_bytes: a larger tensor is alone in its shard.

    Raises:
        AdapterRejected: the adapter does not bind, or belongs to another checkpoint.
        CheckpointRejected: the base is incomplete or foreign.
        InvalidRequest: the output is there already, or the disk is too small or not writable.
    """
    check_shard_bytes(max_shard_bytes)
    config = read_config(base)
    bound = bind_adapter(files, config, max_rank=_HIGHEST_RANK)
    progress("checking the base", 0, 0)
    digest = checkpoint_digest(base)
    if base_digest is not None and digest != base_digest:
        raise AdapterRejected(
            f"{source} belongs to another base model: its digest is {base_digest[:12]}, that of {base} is "
            f"{digest[:12]}; name the checkpoint that it was trained on",
            param="base",
        )
    with ExitStack() as stack:
        entries = _entries(base, stack, config, bound, dtype)
        result = Extraction(out, digest, len(entries), len(bound.targets), sum(entry.size for entry in entries))
        tensors = [
            TensorToWrite(entry.name, entry.dtype, entry.shape, entry.size, partial(_pieces, entry, result.lost))
            for entry in entries
        ]
        beside = companions(base)
        with whole_directory(out, bytes_needed(tensors, beside)) as scratch:
            result.shards = write_checkpoint(
                scratch,
                tensors,
                beside,
                _model_config(base, dtype),
                max_shard_bytes=max_shard_bytes,
                progress=progress,
            )
            write_json(scratch / RECORD, {"adapter": source, **_record(result)})
    return result


def _record(result: Extraction) -> dict[str, Any]:
    return {key: value for key, value in result.summary().items() if key != "out"}


def _entries(base: Path, stack: ExitStack, config: ModelConfig, bound: BoundAdapter, dtype: Keep) -> list[_Entry]:
    """Every tensor of the base, in its order; each adapted layer must be found in its shape."""
    entries: list[_Entry] = []
    wanted = dict(bound.targets)
    names: set[str] = set()
    for file in shard_files(base):
        for name, header, data in raw_tensors(file, stack):
            if name in names:
                raise CheckpointRejected(f"tensor {name} is in the checkpoint twice")
            names.add(name)
            kind, shape = str(header["dtype"]), tuple(header["shape"])
            path = (canonical_name(name) or "").removesuffix(".weight")
            target = wanted.pop(path, None)
            if target is not None and (shape != (target.b.shape[0], target.a.shape[1]) or kind not in _DTYPES):
                raise CheckpointRejected(
                    f"tensor {name} is {kind} {list(shape)}, config.json and the adapter need a float matrix "
                    f"{[target.b.shape[0], target.a.shape[1]]}"
                )
            widened = "F32" if dtype == "float32" and kind in ("F16", "BF16") else kind
            entries.append(_Entry(name, widened, shape, data, kind, target))
    present = {canonical_name(entry.name): entry.shape for entry in entries}
    for path, expected in config.as_stored(config.tensor_shapes(), present).items():
        if path not in present:
            raise CheckpointRejected(f"tensor {path} is missing from the checkpoint {base}")
        if present[path] != expected:
            raise CheckpointRejected(
                f"tensor {path} of {base} has shape {list(present[path])}, config.json asks for {list(expected)}"
            )
    return entries


def _pieces(entry: _Entry, lost: dict[str, float]) -> Iterator[bytes | memoryview]:
    """The tensor's bytes; of an adapted one also the share of the delta that rounding changed, into ``lost``."""
    if entry.target is not None:
        yield from _adapted_pieces(entry, entry.target, lost)
        return
    for start in range(0, len(entry.source), _COPY_BYTES):
        part = entry.source[start : start + _COPY_BYTES]
        yield part if entry.dtype == entry.source_dtype else _bytes(_tensor(part, entry).float())


def _adapted_pieces(entry: _Entry, target: BoundTarget, lost: dict[str, float]) -> Iterator[bytes]:
    a = target.a.double() * target.scale
    rows, width = entry.shape
    row_bytes = len(entry.source) // rows
    step = max(1, _ENTRIES // width)
    rounding = size = 0.0
    for start in range(0, rows, step):
        delta = target.b[start : start + step].double() @ a
        part = entry.source[start * row_bytes : (start + step) * row_bytes]
        exact = _tensor(part, entry).view(-1, width).double() + delta
        stored = exact.to(_DTYPES[entry.dtype])
        rounding += float((stored.double() - exact).square().sum())
        size += float(delta.square().sum())
        yield _bytes(stored)
    lost[_path(entry.name)] = math.sqrt(rounding / size) if size > 0 else 0.0


def _tensor(part: memoryview, entry: _Entry) -> Tensor:
    """A copy: the mapped file may lie at any address."""
    return torch.frombuffer(bytearray(part), dtype=_DTYPES[entry.source_dtype])


def _bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _path(name: str) -> str:
    return (canonical_name(name) or name).removesuffix(".weight")


def _model_config(base: Path, dtype: Keep) -> dict[str, Any]:
    """config.json, with the dtype of the result."""
    data: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if dtype == "float32":
        for part in (data, data.get("text_config"), data.get("vision_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part, dict) and key in part:
                    part[key] = "float32"
    return data
