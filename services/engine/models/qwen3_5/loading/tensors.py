"""Tensors of a checkpoint's safetensors files: found by name, checked against the config, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import MTP_PREFIX, canonical_name, shard_files
from services.engine.models.config import ModelConfig

_FLOATS = ("F64", "F32", "BF16", "F16")
_FLOAT8 = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
"""Endings of a scale's name behind that of its matrix. Both are factors: the first is named for what quantizing
divided by."""


class _Shard(Protocol):
    """Methods of safetensors' open file that are used."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> Any: ...
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RowScales:
    """Scales of a float8 matrix, taken apart by rows."""

    values: Tensor
    """[N, groups] float32."""
    width: int
    """Neighbours in a row that share a scale."""


class CheckpointTensors:
    """Open tensors of a checkpoint by canonical name; those of the mtp layer keep their own.

    Args:
        stack: closes the files.
        named: shapes of what the model consists of.
        mtp: tensors of the mtp layer count.

    Raises:
        CheckpointRejected: no files or a corrupt one, or a tensor that is missing, unknown, twice there, misshaped, of
            another dtype, or without its scales.
    """

    def __init__(
        self, path: Path, stack: ExitStack, config: ModelConfig, named: Mapping[str, tuple[int, ...]], *, mtp: bool
    ) -> None:
        self._found = found = _open(path, stack, mtp)
        self.shapes = expected = config.as_stored(named, found)
        """Shape of each tensor, scales not counted."""
        self._float8, self._scales = config.float8, dict[str, str]()
        if mtp and not any(name.startswith(MTP_PREFIX) for name in found):
            raise CheckpointRejected("the checkpoint has no mtp layer, which TEMPER_SPECULATIVE=mtp needs: use none")
        for name in expected:
            if name not in found:
                raise CheckpointRejected(f"tensor {name} is missing from the checkpoint")
        for name, shape in expected.items():
            self._check(name, shape)
        allowed = {*expected, *self._scales.values(), "lm_head.weight"}
        for name, (full_name, _) in found.items():
            if name in allowed:
                continue
            matrix = next((name.removesuffix(end) for end in _SCALES if name.removesuffix(end) in expected), None)
            if matrix is not None:
                raise CheckpointRejected(
                    f"tensor {full_name} is the scale of {self._found[matrix][0]}, which has none or is no float8"
                )
            raise CheckpointRejected(f"tensor {full_name} is not part of the model that config.json describes")

    def read(self, name: str) -> Tensor:
        """Contents of a tensor as the file has them, float8 without its scale. Raises CheckpointRejected."""
        full_name, shard = self._found[name]
        try:
            return shard.get_tensor(full_name)
        except SafetensorError as error:
            raise CheckpointRejected(f"tensor {full_name} cannot be read: {error}") from error

    def scales(self, name: str) -> RowScales | None:
        """Scales of all rows of a float8 tensor; None: the tensor is of plain floats.

        Raises:
            CheckpointRejected: they cannot be read, or one is negative or not finite.
        """
        if name not in self._scales or self._float8 is None:
            return None
        scale = self.read(self._scales[name]).to(torch.float32)
        if not bool(((scale >= 0) & scale.isfinite()).all()):
            raise CheckpointRejected(f"tensor {self._found[self._scales[name]][0]} has scales below 0 or not finite")
        *stacked, rows, columns = self.shapes[name]
        if self._float8.block is None:
            return RowScales(scale.reshape(*stacked, -1, 1).expand(*stacked, rows, 1).flatten(0, -2), columns)
        height, width = self._float8.block
        return RowScales(scale.repeat_interleave(height, -2)[..., :rows, :].flatten(0, -2), width)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        full_name, found, dtype = self._described(name)
        if found != shape:
            raise CheckpointRejected(f"tensor {full_name} has shape {list(found)}, config.json asks for {list(shape)}")
        if dtype in _FLOATS:
            return
        if dtype != _FLOAT8 or len(shape) < 2:
            raise CheckpointRejected(
                f"tensor {full_name} is {dtype}: only floats are supported, matrices also in F8_E4M3"
            )
        if self._float8 is None:
            raise CheckpointRejected(f"tensor {full_name} is {dtype}, and config.json has no quantization_config")
        scale = next((name + end for end in _SCALES if name + end in self._found), None)
        if scale is None:
            raise CheckpointRejected(f"tensor {full_name} is {dtype}, and {full_name}{_SCALES[0]} is missing")
        self._scales[name] = scale
        scale_name, scales, kind = self._described(scale)
        if scales not in self._float8.shapes(shape):
            wanted = " or ".join(str(list(each)) for each in self._float8.shapes(shape))
            raise CheckpointRejected(
                f"tensor {scale_name} has shape {list(scales)}, that of {list(shape)} needs {wanted} by "
                "quantization_config.weight_block_size"
            )
        if kind not in _FLOATS:
            raise CheckpointRejected(f"tensor {scale_name} is {kind}: scales must be plain floats")

    def _described(self, name: str) -> tuple[str, tuple[int, ...], str]:
        """Name in the file, shape and dtype of a tensor that is there."""
        full_name, shard = self._found[name]
        view = shard.get_slice(full_name)
        return full_name, tuple(view.get_shape()), str(view.get_dtype())


def _open(path: Path, stack: ExitStack, mtp: bool) -> dict[str, tuple[str, _Shard]]:
    """Canonical name → (name in the file, open shard)."""
    found: dict[str, tuple[str, _Shard]] = {}
    for file in shard_files(path):
        try:
            shard = stack.enter_context(safe_open(file, framework="pt"))
            names = list(shard.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointRejected(f"{file} is not a readable safetensors file: {error}") from error
        for full_name in names:
            name = full_name if mtp and full_name.startswith(MTP_PREFIX) else canonical_name(full_name)
            if name is None:
                continue
            if name in found:
                raise CheckpointRejected(f"tensor {full_name} is in the checkpoint twice (also as {found[name][0]})")
            found[name] = (full_name, shard)
    return found
