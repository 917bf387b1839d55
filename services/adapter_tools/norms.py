"""Size of what an adapter adds to the model's matrices, by kind of module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from services.adapter_tools.convert import read_pairs
from services.adapter_tools.low_rank import Factors


def norms(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Frobenius norm of scale · B A over all layers of each kind of module, and in all; whether every number is finite.

    Raises:
        AdapterRejected: see read_pairs.
    """
    settings, prefix, halves = read_pairs(files)
    squares: dict[str, float] = {}
    finite = True
    for path in sorted({path for path, _ in halves}):
        a, b = halves[path, "A"].double(), halves[path, "B"].double()
        finite = finite and bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
        rank = settings.rank(prefix + path)
        scale = settings.alpha(prefix + path) / (math.sqrt(rank) if settings.use_rslora else rank)
        kind = path.rsplit(".", 1)[-1]
        squares[kind] = squares.get(kind, 0.0) + (scale * Factors(a, b).norm()) ** 2 if finite else math.inf
    return {
        "finite": finite,
        "norms": {kind: math.sqrt(square) for kind, square in sorted(squares.items())} if finite else {},
        "norm": math.sqrt(sum(squares.values())) if finite else None,
    }
