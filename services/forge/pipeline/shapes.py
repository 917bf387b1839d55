"""Shapes and sizes of the checkpoints that a pipeline makes: what a record tells of them, and that what was cut out is
gone."""

from __future__ import annotations

import math
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import raw_tensors, shard_files
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import read_config
from services.forge.compaction import Base
from services.forge.cut import Cut
from services.forge.units import KINDS, WIDTHS, Kind, count

_SCALES = "_scale_inv"


def gone(directory: Path, cut: Cut) -> dict[Kind, int]:
    """Units of each kind that a compacted checkpoint has, in its config and in every tensor.

    Raises:
        CheckpointRejected: units that were cut out are still there.
    """
    shape = shape_of(directory)
    left = {"layers": len(cut.layers)} | {
        width: len(units) for width in WIDTHS if width in cut.kept for units in cut.kept[width].values()
    }
    if wrong := {kind: (shape[kind], number) for kind, number in left.items() if shape[kind] != number}:  # type: ignore[index]
        raise CheckpointRejected(f"{directory} was not cut: it has (and should have) {wrong}")
    return shape


def shape_of(directory: Path) -> dict[Kind, int]:
    """Units of each kind of a checkpoint, each of whose tensors has its shape.

    Raises:
        CheckpointRejected: a tensor is missing or has another shape than config.json says.
    """
    with ExitStack() as stack:
        config = Base(directory, stack).config
    return {kind: count(config, kind) for kind in KINDS}


def sizes(before: Path, after: Path) -> dict[str, Any]:
    """Parameters, bytes and widths of two checkpoints, as JSON."""
    pairs = {kind: [_count(before, kind), _count(after, kind)] for kind in KINDS}
    (parameters, nbytes), (parameters_after, bytes_after) = map(_size, (before, after))
    return {
        "parameters": parameters,
        "parameters_after": parameters_after,
        "bytes": nbytes,
        "bytes_after": bytes_after,
        "shape": {kind: pair for kind, pair in pairs.items() if pair[0] != pair[1]},
    }


def _count(directory: Path, kind: Kind) -> int:
    config = read_config(directory)
    if not isinstance(config, Qwen3_5Config):
        raise CheckpointRejected(f"{directory} is no model that can be cut")
    return count(config, kind)


def _size(directory: Path) -> tuple[int, int]:
    parameters = nbytes = 0
    with ExitStack() as stack:
        for file in shard_files(directory):
            for name, header, data in raw_tensors(file, stack):
                nbytes += len(data)
                parameters += 0 if name.endswith(_SCALES) else math.prod(header["shape"])
    return parameters, nbytes


def device_name(device: str) -> str:
    """Name of a device in records."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or device
