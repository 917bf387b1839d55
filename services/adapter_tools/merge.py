"""Several adapters of one linear layer into one.

With the parents' deltas D_i = scale_i · B_i A_i and weights w_i, the exact merged delta is
    weighted, svd   λ Σ w_i D_i
    ties            trim D_i to its largest entries; the sign of each entry is that of Σ w_i D_i; mean of the entries
                    w_i D_i of that sign, weighted by |w_i|; times λ (Yadav et al., arXiv 2306.01708: equal weights)
    dare_linear     drop each entry of D_i with probability 1 − density, divide the rest by density; λ Σ w_i D_i
                    (Yu et al., arXiv 2311.03099)
    dare_ties       the same with the election of signs and the mean of ties
Weighted merges never form a delta: the factors are concatenated, on the CPU, in float64. The others do, one layer at a
time, in float32 on the workshop's device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.adapter_tools.low_rank import Factors, concatenated, nearest, truncated
from services.adapter_tools.sparse import Weighted as Weighted
from services.adapter_tools.sparse import merged_entries
from services.adapter_tools.workshop import ALONE, Workshop
from services.common.jobs import SPARSE_METHODS, MergeSettings

_MARGIN = 1.15
"""Factor for what is not counted, and for what an allocator rounds up."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result for one layer, as it is stored."""

    a: Tensor
    """[rank, in] float32."""
    b: Tensor
    """[out, rank] float32."""
    error: float
    """‖stored − exact‖ / ‖exact‖, Frobenius; 0 where the exact delta is 0."""


def merge_layer(
    path: str, parents: Sequence[Weighted], settings: MergeSettings, seed: int, shop: Workshop = ALONE
) -> Merged:
    """Merges the deltas of one linear layer.

    Args:
        path: of the layer; with ``seed`` and a parent's index it decides which entries DARE drops.
        parents: those that adapt the layer, at least one; all [out, in] alike.
        shop: where dense deltas are computed, and whose turns everything takes. Results do not depend on it beyond
            rounding.

    Raises:
        ValueError: the parents' shapes differ.
    """
    shapes = {(parent.factors.b.shape[0], parent.factors.a.shape[1]) for parent in parents}
    if len(shapes) != 1:
        raise ValueError(f"{path}: parents of shapes {sorted(shapes)} cannot be merged")
    if settings.method not in SPARSE_METHODS:
        with shop.host():
            return _low_rank(parents, settings)
    exact = merged_entries(path, parents, settings, seed, shop)
    stored = nearest(exact, settings.rank or 1, shop).rounded()
    return _result(stored, _error(exact, stored, shop))


def working_bytes(shape: tuple[int, int], num_parents: int, settings: MergeSettings, shop: Workshop) -> int:
    """What `merge_layer` has at once of a layer's [out, in] on the shop's device; 0 if it needs the CPU only."""
    if settings.method not in SPARSE_METHODS:
        return 0
    out, width = shape
    numbers, side = out * width, min(shape)
    count = min(settings.rank or 1, side)
    piece = min(numbers * num_parents, max(shop.piece_numbers, width * num_parents))
    merging = (4 + 1) * numbers + 4 * 7 * piece
    # The basis and its products with blocks; or, where that does not end, the Gram matrix and a piece in float64.
    blocks = 8 * 4 * (count + 8) * (out + width)
    finding = 4 * numbers + blocks + 8 * side * side + 8 * min(numbers, max(shop.piece_numbers, width))
    return int(_MARGIN * max(merging, finding))


def _low_rank(parents: Sequence[Weighted], settings: MergeSettings) -> Merged:
    exact = concatenated(
        [Factors(p.factors.a, p.factors.b * (settings.scale * p.weight)) for p in parents],
    )
    cut = settings.rank is not None and (settings.method == "svd" or settings.rank < exact.rank)
    stored = (truncated(exact, settings.rank or 1) if cut else exact).rounded()
    norm = exact.norm()
    return _result(stored, stored.distance(exact) / norm if norm > 0 else 0.0)


def _error(exact: Tensor, stored: Factors, shop: Workshop) -> float:
    a, b = stored.a.float().to(shop.device), stored.b.float().to(shop.device)
    with shop.turn():
        missed = torch.zeros((), dtype=torch.float64, device=shop.device)
        energy = torch.zeros_like(missed)
        for rows in shop.pieces(exact.shape):
            difference = torch.addmm(exact[rows], b[rows], a, alpha=-1)
            missed += torch.linalg.vector_norm(difference, dtype=torch.float64).square()
            energy += torch.linalg.vector_norm(exact[rows], dtype=torch.float64).square()
    norm = float(energy)
    return math.sqrt(float(missed) / norm) if norm > 0 else 0.0


def _result(stored: Factors, error: float) -> Merged:
    return Merged(stored.a.float().contiguous(), stored.b.float().contiguous(), error)
