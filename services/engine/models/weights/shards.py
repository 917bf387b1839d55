"""A checkpoint directory that is being written: tensors in safetensors shards with their index, and the files beside
them. Without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from services.common.errors import InvalidRequest

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_LEAST_SHARD_BYTES = 2**20
_COMPANIONS = (".json", ".jinja", ".txt", ".model")
"""Endings of what a checkpoint has beside its weights: configuration, tokenizer, template, licence."""
RECORDS = ("temper_extract.json", "forge.json", "forge.json.sig")
"""Files that say how a checkpoint was made: they are not true of one made from it."""
_FOREIGN = ("adapter_config.json", *RECORDS)


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One tensor of the result."""

    name: str
    dtype: str
    """Type as safetensors writes it."""
    shape: tuple[int, ...]
    size: int
    """Bytes of all pieces."""
    pieces: Callable[[], Iterator[bytes | memoryview]]
    """Its bytes, a few at a time."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
    del stage, done, total


def companions(base: Path) -> list[Path]:
    """Files beside a checkpoint's weights that belong to a checkpoint made from it, config.json among them."""
    return [path for path in sorted(base.iterdir()) if path.is_file() and _belongs(path)]


def bytes_needed(tensors: Sequence[TensorToWrite], beside: Sequence[Path]) -> int:
    """Bytes on disk of a checkpoint, at most."""
    weights = sum(tensor.size for tensor in tensors)
    return weights + sum(path.stat().st_size for path in beside) + 256 * len(tensors) + 2**20


def write_checkpoint(
    directory: Path,
    tensors: Sequence[TensorToWrite],
    beside: Sequence[Path],
    config: Any,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> int:
    """Writes shards, their index, config.json and the files beside them into a directory that is there.

    Args:
        beside: files that are copied, but for config.json.
        config: of the result, as parsed JSON.
        max_shard_bytes: a larger tensor is alone in its shard.

    Returns:
        The number of shards.

    Raises:
        InvalidRequest: the shards would be too small.
        OSError
    """
    check_shard_bytes(max_shard_bytes)
    shards = _shards(tensors, max_shard_bytes)
    total = sum(tensor.size for tensor in tensors)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: name for tensor in shard}
        with (directory / name).open("wb") as file:
            file.write(_header(shard))
            for tensor in shard:
                written = sum(file.write(piece) for piece in tensor.pieces())
                if written != tensor.size:
                    raise ValueError(f"tensor {tensor.name} has {written} bytes instead of {tensor.size}")
                done += tensor.size
                progress("writing", done, total)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    for path in beside:
        if path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    write_json(directory / "config.json", config)
    return len(shards)


def check_shard_bytes(size: int) -> None:
    """Refuses shards of less than 1 MiB. Raises InvalidRequest."""
    if size < _LEAST_SHARD_BYTES:
        raise InvalidRequest(f"a shard of {size} bytes is too small: 1 MiB at least", param="max_shard_size")


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file for people to read, too."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _belongs(path: Path) -> bool:
    kept = path.suffix in _COMPANIONS or path.name.upper().startswith(("LICENSE", "NOTICE"))
    return kept and not path.name.endswith(".index.json") and path.name not in _FOREIGN


def _shards(tensors: Sequence[TensorToWrite], limit: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    return shards


def _header(shard: Sequence[TensorToWrite]) -> bytes:
    """github.com/huggingface/safetensors#format: the length, then JSON, padded so that the data is aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in shard:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
