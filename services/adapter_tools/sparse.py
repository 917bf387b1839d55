"""The entries of a merged delta by TIES and DARE: trimmed, dropped, elected and summed, in pieces, as float32.

Yadav et al., arXiv 2306.01708; Yu et al., arXiv 2311.03099. What is kept is decided exactly as they say: by the k-th
largest magnitude of a parent's whole delta, or by a draw for every entry.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.adapter_tools.low_rank import Factors
from services.adapter_tools.workshop import Workshop
from services.common.jobs import MergeSettings

_SIGNS = frozenset(["ties", "dare_ties"])
"""Methods that elect a sign for each entry."""
_SAMPLE = 2**16
"""Entries that say about where the k-th largest is."""
_DEVIATIONS = 6.0
"""How far off they may be, in standard deviations of their count; if they are further, all entries are looked at."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """One parent's delta of a layer."""

    factors: Factors
    """Factors of the delta, its scale included."""
    weight: float
    index: int
    """Place among the sources, which DARE's random entries depend on."""


@dataclass(frozen=True, slots=True)
class _Thin:
    """A parent's factors as the pieces are computed from them: float32, on the device."""

    a: Tensor
    b: Tensor

    def entries(self, rows: slice) -> Tensor:
        """Some rows of the delta."""
        return self.b[rows] @ self.a


def merged_entries(
    path: str, parents: Sequence[Weighted], settings: MergeSettings, seed: int, shop: Workshop
) -> Tensor:
    """The exact merged delta, [out, in] float32 on the shop's device.

    Args:
        path: of the layer; with ``seed`` and a parent's index it decides which entries DARE drops.
    """
    shape = (parents[0].factors.b.shape[0], parents[0].factors.a.shape[1])
    density = settings.density if settings.density is not None else 1.0
    thin = [_Thin(p.factors.a.float().to(shop.device), p.factors.b.float().to(shop.device)) for p in parents]
    weights = torch.tensor([abs(p.weight) for p in parents], dtype=torch.float32).view(-1, 1, 1).to(shop.device)
    total = torch.empty(shape, dtype=torch.float32, device=shop.device)
    trims = settings.method == "ties"
    factors = [parent.weight / (1.0 if trims else density) for parent in parents]
    # The same pieces as below, to the bit: a threshold that an entry equals there must be equal here.
    rows_of_pieces = shop.rows(shape, layers=len(parents))
    kept = max(1, int(density * total.numel()))
    limits = [smallest_kept(one, rows_of_pieces, kept, total, shop) for one in thin] if trims else []
    draws = [] if trims else [_Draws(seed, path, parent.index, density) for parent in parents]
    for rows in rows_of_pieces:
        with shop.host():
            chosen = [one.rows(rows, shape[1]) for one in draws]
        masks = [None if one is None else one.to(shop.device) for one in chosen]
        with shop.turn():
            entries = [one.entries(rows) for one in thin]
            for delta, limit in zip(entries, limits, strict=False):
                delta.mul_(_at_least(delta.abs(), limit))
            for delta, mask in zip(entries, masks, strict=False):
                if mask is not None:
                    delta.mul_(mask.to(delta.dtype))
            for delta, factor in zip(entries, factors, strict=True):
                delta.mul_(factor)
            stacked = torch.stack(entries)
            merged = _elected(stacked, weights) if settings.method in _SIGNS else stacked.sum(0)
            torch.mul(merged, settings.scale, out=total[rows])
    return total


def _elected(entries: Tensor, weights: Tensor) -> Tensor:
    """The mean of the entries that have the sign of their sum, by the sizes of their weights.

    Args:
        entries: [parents, rows, in], weights included.
        weights: [parents, 1, 1] magnitudes.
    """
    elected = entries.sum(0).sign_()
    agreeing = (entries * elected).relu_()
    mass = (agreeing.sign() * weights).sum(0)
    return agreeing.sum(0).mul_(elected).div_(mass.clamp_min_(torch.finfo(mass.dtype).tiny))


def _at_least(magnitudes: Tensor, limit: Tensor) -> Tensor:
    """1.0 where a number is at least the limit, else 0.0; overwrites the numbers. By subtraction: on a CPU a fifth of
    the time of what goes through booleans, and as exact: a difference of floats is 0 only where they are equal."""
    return magnitudes.sub_(torch.nextafter(limit, torch.zeros_like(limit))).relu_().sign_()


def smallest_kept(thin: _Thin, rows_of_pieces: Sequence[slice], kept: int, scratch: Tensor, shop: Workshop) -> Tensor:
    """The magnitude from which an entry is among the ``kept`` largest; equal entries stay together. Takes turns.

    Args:
        scratch: [out, in] float32 on the device; overwritten with the magnitudes.
    """
    if kept >= scratch.numel():
        return torch.zeros((), device=shop.device)
    if shop.device.type != "cpu":
        for rows in rows_of_pieces:
            with shop.turn():
                torch.abs(thin.entries(rows), out=scratch[rows])
        return kth_largest_by_bits(scratch, kept, shop)
    with shop.host():
        low, high = _bracket(thin, kept, scratch.numel())
    above, inside = 0, []
    for rows in rows_of_pieces:
        with shop.turn():
            # numpy's comparisons and selections take a quarter of the time of torch's.
            magnitudes = torch.abs(thin.entries(rows), out=scratch[rows]).numpy()
            above += int(np.count_nonzero(magnitudes > high))
            inside.append(magnitudes[(magnitudes >= low) & (magnitudes <= high)])
    with shop.turn():
        found = np.concatenate(inside)
        if not above < kept <= above + found.size:
            above, found = 0, scratch.numpy().ravel()
        place = found.size - (kept - above)
        return torch.from_numpy(np.partition(found, place)[place : place + 1])[0]


def _bracket(thin: _Thin, kept: int, numel: int) -> tuple[float, float]:
    """Two magnitudes that the k-th largest most likely lies between."""
    if numel <= 4 * _SAMPLE:
        return 0.0, math.inf
    width = thin.a.shape[1]
    places = torch.randint(numel, (_SAMPLE,), generator=torch.Generator().manual_seed(0))
    sample = (thin.b[places // width] * thin.a.T.contiguous()[places % width]).sum(1).abs()
    ordered = sample.sort(descending=True).values
    share = kept / numel
    off = _DEVIATIONS * math.sqrt(_SAMPLE * share * (1 - share)) + 2
    first, last = math.floor(share * _SAMPLE - off), math.ceil(share * _SAMPLE + off)
    return (
        float(ordered[last]) if last < _SAMPLE else 0.0,
        float(ordered[first]) if first >= 0 else math.inf,
    )


def kth_largest_by_bits(magnitudes: Tensor, k: int, shop: Workshop) -> Tensor:
    """Exactly the k-th largest of float32 numbers that are not negative, which are ordered as their bits are: bit by
    bit, without a sort and without a word from the device. Takes a turn.

    Args:
        magnitudes: [out, in].
    """
    bits = magnitudes.view(torch.int32)
    with shop.turn():
        found = torch.zeros((), dtype=torch.int32, device=bits.device)
        for bit in reversed(range(31)):
            candidate = found | (1 << bit)
            count = torch.zeros((), dtype=torch.int64, device=bits.device)
            # In pieces, because torch makes 8 bytes of each answer before it counts them.
            for rows in shop.pieces(bits.shape):
                count += (bits[rows] >= candidate).sum()
            found = torch.where(count >= k, candidate, found)
        return found.view(torch.float32)


class _Draws:
    """Which entries of one parent's delta of a layer DARE keeps, from its first row to its last. They depend on seed,
    layer and parent and on nothing else: not on the device, the order of layers, pieces, nor on a restart."""

    def __init__(self, seed: int, path: str, index: int, density: float) -> None:
        digest = hashlib.sha256(f"{seed}:{path}:{index}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        self._density = density

    def rows(self, rows: slice, width: int) -> Tensor | None:
        """[rows, width] bool, for the rows that follow those of the call before; None: all of them."""
        if self._density >= 1:
            return None
        drawn = torch.rand(rows.stop - rows.start, width, generator=self._generator, dtype=torch.float64)
        return drawn < self._density
