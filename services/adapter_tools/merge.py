"""Several adapters of one linear layer into one.

With the parents' deltas D_i = scale_i · B_i A_i and weights w_i, the exact merged delta is
    weighted, svd   λ Σ w_i D_i
    ties            trim D_i to its largest entries; the sign of each entry is that of Σ w_i D_i; mean of the entries
                    w_i D_i of that sign, weighted by |w_i|; times λ (Yadav et al., arXiv 2306.01708: equal weights)
    dare_linear     drop each entry of D_i with probability 1 − density, divide the rest by density; λ Σ w_i D_i
                    (Yu et al., arXiv 2311.03099)
    dare_ties       the same with the election of signs and the mean of ties
Weighted merges never form a delta: the factors are concatenated. The others do, one layer at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.adapter_tools.low_rank import Factors, concatenated, nearest, truncated
from services.common.jobs import MergeSettings

_SIGNS = frozenset(["ties", "dare_ties"])
"""Methods that elect a sign for each entry."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """One parent's delta of a layer."""

    factors: Factors
    """Its scale included."""
    weight: float
    index: int
    """Its place among the sources, which DARE's random entries depend on."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The result for one layer, as it is stored."""

    a: Tensor
    """[rank, in] float32."""
    b: Tensor
    """[out, rank] float32."""
    error: float
    """‖stored − exact‖ / ‖exact‖, Frobenius; 0 where the exact delta is 0."""


def merge_layer(path: str, parents: Sequence[Weighted], settings: MergeSettings, seed: int) -> Merged:
    """Merges the deltas of one linear layer.

    Args:
        path: of the layer; with ``seed`` and a parent's index it decides which entries DARE drops.
        parents: those that adapt the layer, at least one; all [out, in] alike.

    Raises:
        ValueError: the parents' shapes differ.
    """
    shapes = {(parent.factors.b.shape[0], parent.factors.a.shape[1]) for parent in parents}
    if len(shapes) != 1:
        raise ValueError(f"{path}: parents of shapes {sorted(shapes)} cannot be merged")
    if settings.method in ("weighted", "svd"):
        return _low_rank(parents, settings)
    exact = _dense(path, parents, settings, seed)
    stored = nearest(exact, settings.rank or 1).rounded()
    norm = float(exact.norm())
    return _result(stored, float((exact - stored.dense()).norm()) / norm if norm > 0 else 0.0)


def _low_rank(parents: Sequence[Weighted], settings: MergeSettings) -> Merged:
    exact = concatenated(
        [Factors(p.factors.a, p.factors.b * (settings.scale * p.weight)) for p in parents],
    )
    cut = settings.rank is not None and (settings.method == "svd" or settings.rank < exact.rank)
    stored = (truncated(exact, settings.rank or 1) if cut else exact).rounded()
    norm = exact.norm()
    return _result(stored, stored.distance(exact) / norm if norm > 0 else 0.0)


def _dense(path: str, parents: Sequence[Weighted], settings: MergeSettings, seed: int) -> Tensor:
    """The exact merged delta, [out, in] float64. At most four such matrices exist at once, however many parents."""

    density = settings.density if settings.density is not None else 1.0
    smallest: dict[int, float] = {}

    def sparse(parent: Weighted) -> Tensor:
        delta = parent.factors.dense()
        if settings.method == "ties":
            if parent.index not in smallest:
                smallest[parent.index] = smallest_kept(delta, density)
            return torch.where(delta.abs() >= smallest[parent.index], delta, 0.0)
        return drop(delta, density, _generator(seed, path, parent.index))

    out, width = parents[0].factors.b.shape[0], parents[0].factors.a.shape[1]
    total = torch.zeros(out, width, dtype=torch.float64)
    for parent in parents:
        total += parent.weight * sparse(parent)
    if settings.method not in _SIGNS:
        return settings.scale * total
    elected = total.sign_()
    agreeing = torch.zeros_like(elected)
    weights = torch.zeros_like(elected)
    for parent in parents:  # computed a second time: cheaper than keeping every parent's delta
        entries = parent.weight * sparse(parent)
        agrees = (entries.sign() == elected) & (entries != 0)
        agreeing += entries.mul_(agrees)
        weights += abs(parent.weight) * agrees
    return settings.scale * agreeing / torch.where(weights > 0, weights, 1.0)


def smallest_kept(delta: Tensor, density: float) -> float:
    """The magnitude from which an entry is among the largest ``density`` of them; equal entries stay together."""
    kept = max(1, int(density * delta.numel()))
    return float(delta.abs().flatten().kthvalue(delta.numel() - kept + 1).values)


def drop(delta: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Each entry is kept with probability ``density`` and divided by it: the mean over draws is the delta."""
    if density >= 1:
        return delta
    kept = torch.rand(delta.shape, generator=generator, dtype=torch.float64) < density
    return torch.where(kept, delta / density, 0.0)


def _generator(seed: int, path: str, index: int) -> torch.Generator:
    """Its draws depend on nothing else: not on the order of layers, nor on a restart."""
    digest = hashlib.sha256(f"{seed}:{path}:{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _result(stored: Factors, error: float) -> Merged:
    return Merged(stored.a.float().contiguous(), stored.b.float().contiguous(), error)
