"""Scales of a checkpoint whose matrices are float8, as quantization_config in its config.json says. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import CheckpointRejected

_SUPPORTED = 'only quant_method "fp8" (e4m3, activation_scheme "dynamic") is; take the bfloat16 checkpoint'


@dataclass(frozen=True, slots=True)
class Float8Scales:
    """Layout of the scales beside float8 matrices: ``W = values · scale``."""

    block: tuple[int, int] | None
    """Rows and columns of a matrix that share a scale; None: each row has a scale, or all rows share one."""

    def shapes(self, matrix: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes that the scales of a matrix [..., out, in] may have."""
        *stacked, rows, columns = matrix
        if self.block is None:
            return [(*stacked, rows, 1), (*stacked, rows), (*stacked, 1), tuple(stacked)]
        return [(*stacked, -(-rows // self.block[0]), -(-columns // self.block[1]))]


def read_float8(data: Mapping[str, Any]) -> Float8Scales | None:
    """Reads quantization_config of a parsed config.json; None: it has none.

    ``modules_to_not_convert`` plays no part: whether a tensor is float8 says the tensor itself. Matching names against
    that list has gone wrong elsewhere: "mlp.gate" is not "mlp.gate_proj".

    Raises:
        CheckpointRejected: weights are stored in a way that is not supported.
    """
    given = data.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise CheckpointRejected("config.json: quantization_config is not an object")
    for key, allowed in (("quant_method", ("fp8",)), ("fmt", (None, "e4m3")), ("activation_scheme", (None, "dynamic"))):
        if given.get(key) not in allowed:
            raise CheckpointRejected(
                f"config.json: quantization_config.{key} {given.get(key)!r} is not supported, {_SUPPORTED}"
            )
    block = given.get("weight_block_size")
    if block is None:
        return Float8Scales(None)
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointRejected(
            f"config.json: quantization_config.weight_block_size must be two positive integers, got {block!r}"
        )
    return Float8Scales((block[0], block[1]))
