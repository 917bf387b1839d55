"""Compaction: a checkpoint and a cut into a smaller checkpoint, exactly: what stays has the same bits.

Tensor by tensor from the mapped files, some rows at a time: memory does not depend on the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import CheckpointRejected, InvalidRequest
from services.engine.models.checkpoint import MTP_PREFIX, canonical_name, raw_tensors, shard_files
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import parse_config, read_config_file
from services.engine.models.weights.shards import SHARD_BYTES, Progress, TensorToWrite, silent
from services.forge.checkpoint_output import pieces, write_model
from services.forge.cut import Cut, cut_config
from services.forge.units import Part, count, cuttable, indices, layer_path, parts

_ENTRIES = 2**20
"""Entries of a tensor that are in memory at once."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes before and after, mtp layer and vision weights counted."""

    parameters: int
    parameters_after: int
    bytes: int
    bytes_after: int
    """Of all tensors."""
    shape: Mapping[str, tuple[int, int]]
    """Numbers of the config that change: before and after."""

    def summary(self) -> dict[str, Any]:
        """Plan as JSON."""
        return {
            "parameters": self.parameters,
            "parameters_after": self.parameters_after,
            "bytes": self.bytes,
            "bytes_after": self.bytes_after,
            "shape": {name: list(numbers) for name, numbers in self.shape.items()},
        }


class Base:
    """A checkpoint that is to be cut: its config and its mapped tensors.

    Args:
        stack: closes the files.

    Raises:
        CheckpointRejected: no files or a corrupt one, or a tensor that is missing or misshaped.
        InvalidRequest: such a model cannot be cut.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.data: dict[str, Any] = read_config_file(directory)
        self.config: Qwen3_5Config = cuttable(parse_config(self.data))
        self.tensors: dict[str, tuple[dict[str, Any], memoryview]] = {}
        """Header entry and bytes by the name in the file."""
        for file in shard_files(directory):
            for name, header, data in raw_tensors(file, stack):
                if name in self.tensors:
                    raise CheckpointRejected(f"tensor {name} is in the checkpoint twice")
                self.tensors[name] = header, data
        self.names = {path: name for name in self.tensors if (path := _path(name))}
        """Name in the file by canonical name."""
        self.mtp = any(name.startswith(MTP_PREFIX) for name in self.tensors)
        found = {path: tuple(self.tensors[name][0]["shape"]) for path, name in self.names.items()}
        check_shapes(self.config, found, mtp=self.mtp, what=str(directory))


def check_shapes(config: Qwen3_5Config, found: Mapping[str, tuple[int, ...]], *, mtp: bool, what: str) -> None:
    """Refuses tensors that are not those of the config.

    Args:
        found: shapes by canonical name.

    Raises:
        CheckpointRejected: one is missing or misshaped.
    """
    expected = config.tensor_shapes() | (config.mtp_shapes() if mtp else {})
    for path, shape in expected.items():
        if path not in found:
            raise CheckpointRejected(f"tensor {path} is missing from the checkpoint {what}")
        if found[path] != shape:
            raise CheckpointRejected(
                f"tensor {path} of {what} has shape {list(found[path])}, config.json asks for {list(shape)}"
            )


def compacted(base: Base, cut: Cut) -> list[TensorToWrite]:
    """Tensors of the smaller checkpoint, in the base's order.

    Raises:
        InvalidRequest: the checkpoint cannot be cut so.
    """
    cut.check(base.config, mtp=base.mtp)
    places = parts(base.config)
    renumbered = {layer_path(old): layer_path(new) for new, old in enumerate(cut.layers)}
    made = []
    for name, (header, data) in base.tensors.items():
        layer, inside = _layer(_path(name) or "")
        if layer.startswith("layers."):
            if layer not in renumbered:
                continue
            new_name = name.replace(f"{layer}.", f"{renumbered[layer]}.", 1)
        else:
            new_name = name
        part = places.get(inside) if layer else None
        kept = None if part is None else cut.of(part.width, layer)
        if part is None or kept is None:
            shape = tuple(header["shape"])
            made.append(TensorToWrite(new_name, header["dtype"], shape, len(data), partial(pieces, data)))
        else:
            chosen = indices(part, count(base.config, part.width), kept)
            made.append(_sliced(new_name, header, data, part, chosen))
    return made


def plan(base: Base, tensors: list[TensorToWrite], cut: Cut) -> Plan:
    """Sizes of the base and of what compacted() makes of it."""
    before, after = base.config, parse_config(cut_config(base.data, base.config, cut))
    if not isinstance(after, Qwen3_5Config):
        raise TypeError(f"cutting made a {type(after).__name__} of a Qwen3_5Config")
    numbers = {
        "layers": (before.num_layers, after.num_layers),
        "kv_groups": (before.num_kv_heads, after.num_kv_heads),
        "query_heads": (before.num_heads, after.num_heads),
        "key_heads": (before.linear_key_heads, after.linear_key_heads),
        "value_heads": (before.linear_value_heads, after.linear_value_heads),
        "mlp_channels": (before.intermediate_size, after.intermediate_size),
    }
    return Plan(
        parameters=sum(math.prod(header["shape"]) for header, _ in base.tensors.values()),
        parameters_after=sum(math.prod(tensor.shape) for tensor in tensors),
        bytes=sum(len(data) for _, data in base.tensors.values()),
        bytes_after=sum(tensor.size for tensor in tensors),
        shape={name: pair for name, pair in numbers.items() if pair[0] != pair[1]},
    )


def compact(
    base: Base,
    cut: Cut,
    out: Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes the smaller checkpoint.

    Args:
        out: directory that becomes it, whole or not at all.
        finish: called with the written directory before it gets its name.

    Raises:
        InvalidRequest: the checkpoint cannot be cut so, the output is there already, or the disk is too small.
        CheckpointRejected: what would be written is not what its config.json describes.
    """
    tensors = compacted(base, cut)
    config = cut_config(base.data, base.config, cut)
    found = {path: tensor.shape for tensor in tensors if (path := _path(tensor.name))}
    check_shapes(cuttable(parse_config(config)), found, mtp=base.mtp, what=str(out))
    write_model(out, base.directory, tensors, config, max_shard_bytes=max_shard_bytes, progress=progress, finish=finish)


def _path(name: str) -> str | None:
    """Canonical name of a tensor of the text model or of its mtp layer."""
    return name if name.startswith(MTP_PREFIX) else canonical_name(name)


def _layer(path: str) -> tuple[str, str]:
    """Path of the layer that a tensor is in and the rest, both empty outside of layers."""
    front, layers, rest = path.rpartition("layers.") if path.startswith(("layers.", MTP_PREFIX)) else ("", "", "")
    if not layers:
        return "", ""
    number, _, inside = rest.partition(".")
    return f"{front}{layers}{number}", inside


def _sliced(name: str, header: Mapping[str, Any], data: memoryview, part: Part, chosen: list[int]) -> TensorToWrite:
    shape = tuple(header["shape"])
    itemsize = len(data) // math.prod(shape)
    if itemsize not in _WORDS:
        raise InvalidRequest(f"tensor {name} is {header['dtype']} and cannot be cut", param="model")
    after = tuple(len(chosen) if axis == part.axis else size for axis, size in enumerate(shape))
    # What the axis is counted in: [before, axis, behind] words.
    flat = (math.prod(shape[: part.axis]), shape[part.axis], math.prod(shape[part.axis + 1 :]))
    words = np.frombuffer(data, _WORDS[itemsize]).reshape(flat)
    size = math.prod(after) * itemsize
    return TensorToWrite(name, header["dtype"], after, size, partial(_chosen, words, np.array(chosen), part.axis))


def _chosen(words: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any], axis: int) -> Iterator[bytes]:
    """Bytes of the chosen places of the middle axis, in order."""
    if axis == 0:
        step = max(1, _ENTRIES // words.shape[2])
        for start in range(0, len(chosen), step):
            yield words[0, chosen[start : start + step]].tobytes()
    else:
        step = max(1, _ENTRIES // len(chosen))
        for start in range(0, len(words), step):
            yield words[start : start + step, chosen].tobytes()
