"""Output of a step that makes a checkpoint: a directory that is there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.adapter_tools.output import whole_directory
from services.engine.models.weights.shards import (
    SHARD_BYTES,
    Progress,
    TensorToWrite,
    bytes_needed,
    check_shard_bytes,
    companions,
    silent,
    write_checkpoint,
)

_PIECE_BYTES = 16 * 2**20


def write_model(
    out: Path,
    base: Path,
    tensors: Sequence[TensorToWrite],
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes a checkpoint with the tokenizer and the other files of its base.

    Args:
        out: directory that becomes it.
        base: directory of the checkpoint that it was made of.
        finish: called with the written directory before it gets its name.

    Raises:
        InvalidRequest: the output is there already, the disk is too small, or the shards would be.
    """
    check_shard_bytes(max_shard_bytes)
    beside = companions(base)
    with whole_directory(out, bytes_needed(tensors, beside)) as scratch:
        write_checkpoint(scratch, tensors, beside, config, max_shard_bytes=max_shard_bytes, progress=progress)
        finish(scratch)


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Bytes of a tensor that stays as it is."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
