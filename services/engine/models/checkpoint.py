"""A checkpoint directory as files: its shards, its tensors' bytes by mmap, and its digest. Without torch, so that
what fetches a model computes the digest that the engine will see."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.common.errors import CheckpointRejected
from services.engine.models.registry import read_config

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""Multimodal class, its older spelling, text class."""
MTP_PREFIX = "mtp."
_SKIPPED = (MTP_PREFIX, "model.visual.", "visual.", "model.language_model.rotary_emb.", "model.rotary_emb.")
_MAX_HEADER = 100 * 2**20


def canonical_name(name: str) -> str | None:
    """A tensor's name without its class prefix, or None if it is not part of the text model (vision, mtp)."""
    if name.startswith(_SKIPPED):
        return None
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def shard_files(path: Path) -> list[Path]:
    """A checkpoint's weights: the files of the index if there is one, else every safetensors file.

    Raises:
        CheckpointRejected: no files, or the index names one that is not there.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointRejected(f"{path} has no *.safetensors file")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointRejected(f"{index} has no readable weight_map: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name or not (path / name).is_file():
            raise CheckpointRejected(f"{index} names the shard {name!r}, which is not in {path}")
    return [path / name for name in names]


def checkpoint_digest(path: str | Path) -> str:
    """sha256 (hex) of the text model: its ModelConfig and each tensor's name, dtype, shape and bytes, in name order.

    Neither sharding nor the class prefix nor vision weights nor the mtp layer change it, nor a context that was
    lengthened (ModelConfig.digested). Tensors are hashed on several threads.

    Raises:
        CheckpointRejected: a file that cannot be read.
    """
    directory = Path(path)
    config = read_config(directory)
    total = hashlib.sha256(json.dumps(config.digested(), sort_keys=True).encode())
    with ExitStack() as stack, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        tensors: dict[str, tuple[str, memoryview]] = {}
        for file in shard_files(directory):
            for full_name, header, data in raw_tensors(file, stack):
                name = canonical_name(full_name)
                if name is not None and not (name == "lm_head.weight" and config.tie_word_embeddings):
                    tensors[name] = (f"{name}\0{header['dtype']}\0{header['shape']}", data)
        ordered = [tensors[name] for name in sorted(tensors)]
        digests = list(pool.map(lambda item: hashlib.sha256(item[1]).digest(), ordered))
        for (description, _), digest in zip(ordered, digests, strict=True):
            total.update(description.encode() + b"\0" + digest)
    return total.hexdigest()


def raw_tensors(file: Path, stack: ExitStack) -> Iterator[tuple[str, dict[str, Any], memoryview]]:
    """Each tensor's name, header entry and bytes; format: 8 bytes little-endian header size, JSON header, data
    (https://huggingface.co/docs/safetensors)."""
    try:
        handle = stack.enter_context(file.open("rb"))
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        (size,) = struct.unpack("<Q", mapped[:8])
        if size > min(_MAX_HEADER, len(mapped) - 8):
            raise ValueError("the header is longer than the file")
        header = json.loads(mapped[8 : 8 + size])
        whole = memoryview(mapped)  # keeps the mapping alive until the last slice is gone
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(mapped) - 8 - size:
                raise ValueError(f"tensor {name} lies outside the file")
            yield name, entry, whole[8 + size + begin : 8 + size + end]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointRejected(f"{file} is not a readable safetensors file: {error}") from error
