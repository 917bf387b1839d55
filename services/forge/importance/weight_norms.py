"""Norms of units' weights, streamed from a checkpoint's files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.common.errors import CheckpointRejected
from services.forge.compaction import Base
from services.forge.units import MTP_LAYER, OUTPUTS, WIDTHS, Part, Width, count, layer_path, parts, places

_ROWS_BYTES = 8 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightNorms:
    """Norms of a checkpoint's weights, in float64."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._parts = parts(base.config)

    def widths(self, width: Width) -> dict[str, Tensor]:
        """L2 norm of all weights of each unit: layer path → [units]."""
        total = count(self._base.config, width)
        found = {}
        for layer in places(self._base.config, width, mtp=self._base.mtp):
            squares = torch.zeros(total, dtype=torch.float64)
            for inside, part in self._parts.items():
                if part.width == width:
                    squares += _by_unit(self._squares(f"{layer}.{inside}", part), part, total)
            found[layer] = squares.sqrt()
        return found

    def layers(self) -> Tensor:
        """L2 norm of all weights of each layer's units: [layers]."""
        everything = [self.widths(width) for width in WIDTHS]
        return torch.stack(
            [
                sum(
                    (norms[path].square().sum() for norms in everything if path in norms),
                    start=torch.zeros((), dtype=torch.float64),
                ).sqrt()
                for path in map(layer_path, range(self._base.config.num_layers))
            ]
        )

    def output_columns(self) -> dict[str, Tensor]:
        """L2 norm of each column of the output projections but those of the mtp layer: path → [in]."""
        return {
            f"{layer}.{module}": self._squares(f"{layer}.{module}.weight", self._parts[f"{module}.weight"]).sqrt()
            for module, width in OUTPUTS.items()
            for layer in places(self._base.config, width, mtp=self._base.mtp)
            if layer != MTP_LAYER
        }

    def _squares(self, path: str, part: Part) -> Tensor:
        """Sums of squares over a tensor's other axes: [size of the part's axis]."""
        header, data = self._base.tensors[self._base.names[path]]
        shape, dtype = tuple(header["shape"]), _DTYPES.get(header["dtype"])
        if dtype is None:
            raise CheckpointRejected(f"tensor {path} is {header['dtype']}: weights must be plain floats")
        row_bytes = len(data) // shape[0]
        step = max(1, _ROWS_BYTES // row_bytes)
        found = []
        for start in range(0, shape[0], step):
            piece = data[start * row_bytes : (start + step) * row_bytes]
            rows = torch.frombuffer(bytearray(piece), dtype=dtype).view(-1, math.prod(shape[1:])).double().square()
            found.append(rows.sum(1 - part.axis))
        return torch.cat(found) if part.axis == 0 else torch.stack(found).sum(0)


def _by_unit(values: Tensor, part: Part, units: int) -> Tensor:
    """Sums of an axis' values by unit."""
    segments = torch.split(values, [units * size for size in part.sizes])
    return torch.stack([segment.view(units, -1).sum(1) for segment in segments]).sum(0)
