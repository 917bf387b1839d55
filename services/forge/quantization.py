"""Quantization of a checkpoint to float8, as the published ones have it: blocks of 128 × 128 with a scale each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.quantize import FP8_MAX
from services.common.errors import InvalidRequest
from services.engine.models.checkpoint import raw_tensors, shard_files
from services.engine.models.registry import parse_config, read_config_file
from services.engine.models.weights.shards import SHARD_BYTES, Progress, TensorToWrite, silent
from services.forge.checkpoint_output import pieces, write_model

BLOCK = (128, 128)
_KEPT = frozenset({"embed_tokens", "lm_head", "conv1d", "in_proj_a", "in_proj_b", "fc", "gate", "shared_expert_gate"})
"""Modules by their last name that stay plain floats, as in the published checkpoints: small, or sensitive."""
_ROWS = 16 * BLOCK[0]
"""Rows of a matrix that are in float32 at once."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def quantization_config(kept: Sequence[str], block: tuple[int, int] | None = BLOCK) -> dict[str, Any]:
    """Entry of config.json.

    Args:
        kept: modules that stay plain floats.
        block: rows and columns that share a scale; None: rows have one each.
    """
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | {
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": list(kept),
    }


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """True of tensors that become float8: matrices of linear layers of the text model."""
    return len(shape) == 2 and name.split(".")[-2] not in _KEPT and ".visual." not in name


def quantized_bytes(tensors: Sequence[TensorToWrite]) -> int:
    """Bytes of a checkpoint's tensors once its matrices are float8, scales counted."""
    return sum(
        shape[0] * shape[1] + 2 * _blocks(shape)
        if len(shape := tensor.shape) == 2 and is_quantized(tensor.name, shape)
        else tensor.size
        for tensor in tensors
    )


def _blocks(shape: tuple[int, ...]) -> int:
    return math.prod(-(-size // step) for size, step in zip(shape, BLOCK, strict=True))


def to_float8(weight: Tensor, block: tuple[int, int] | None = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix as values and scales.

    Args:
        weight: [out, in].
        block: rows and columns that share a scale; None: rows have one each.

    Returns:
        [out, in] float8_e4m3fn, and [blocks of rows, blocks of columns] bfloat16.
    """
    height, width = block or (1, weight.shape[1])
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, (height, width), strict=True))
    padded = torch.zeros(rows * height, columns * width)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows, height, columns, width)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    values = (blocks / scale.float()[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)
    return values[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


class Quantized:
    """A checkpoint and what quantizing makes of it, mapped and not yet computed.

    Args:
        stack: closes the files.

    Raises:
        InvalidRequest: it is quantized already, or a matrix is not of plain floats.
        CheckpointRejected: no files or a corrupt one.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._data = read_config_file(directory)
        if parse_config(self._data).float8 is not None:
            raise InvalidRequest(f"{directory} is quantized already", param="model")
        self.bytes = 0
        """Of the tensors as they are."""
        self.tensors: list[TensorToWrite] = []
        self._kept: list[str] = []
        for file in shard_files(directory):
            for name, header, data in raw_tensors(file, stack):
                self.bytes += len(data)
                self._add(name, header, data)

    @property
    def bytes_after(self) -> int:
        """Bytes of the tensors that are written, scales counted."""
        return sum(tensor.size for tensor in self.tensors)

    def write(
        self,
        out: Path,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        progress: Progress = silent,
        finish: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Writes the quantized checkpoint.

        Args:
            out: directory that becomes it, whole or not at all.
            finish: called with the written directory before it gets its name.

        Raises:
            InvalidRequest: the output is there already, or the disk is too small.
        """
        config = self._data | {"quantization_config": quantization_config(self._kept)}
        write_model(
            out,
            self._directory,
            self.tensors,
            config,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
            finish=finish,
        )

    def _add(self, name: str, header: Mapping[str, Any], data: memoryview) -> None:
        shape, dtype = tuple(header["shape"]), str(header["dtype"])
        if not is_quantized(name, shape):
            if len(shape) > 1:
                self._kept.append(name.removesuffix(".weight"))
            self.tensors.append(TensorToWrite(name, dtype, shape, len(data), partial(pieces, data)))
            return
        if dtype not in _DTYPES:
            raise InvalidRequest(f"tensor {name} is {dtype}: only plain floats can be quantized", param="model")
        values, scales = (partial(_pieces, data, shape, _DTYPES[dtype], part) for part in (0, 1))
        blocks = tuple(-(-size // step) for size, step in zip(shape, BLOCK, strict=True))
        self.tensors.append(TensorToWrite(name, "F8_E4M3", shape, shape[0] * shape[1], values))
        self.tensors.append(TensorToWrite(f"{name}_scale_inv", "BF16", blocks, 2 * blocks[0] * blocks[1], scales))


def _pieces(data: memoryview, shape: tuple[int, int], dtype: torch.dtype, part: int) -> Iterator[bytes]:
    """Bytes of the values (part 0) or the scales (part 1) of a matrix, whole blocks of rows at a time."""
    row_bytes = len(data) // shape[0]
    for start in range(0, shape[0], _ROWS):
        rows = torch.frombuffer(bytearray(data[start * row_bytes : (start + _ROWS) * row_bytes]), dtype=dtype)
        made = to_float8(rows.view(-1, shape[1]))[part]
        yield made.contiguous().view(torch.uint8).numpy().tobytes()
