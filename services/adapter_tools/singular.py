"""The leading singular vectors of a large dense matrix, in pieces of a few milliseconds, on any device.

Only products of the matrix with thin blocks touch all of its numbers; they are taken in its dtype. Whatever is as small
as a block or a basis is float64; decompositions are the CPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.adapter_tools.workshop import Workshop

_OVERSAMPLING = 8
"""Vectors of a block beyond those that are asked for."""
_LOOK_COLUMNS = 48
"""Columns of the basis, between two looks at how far the iteration is; at least one block."""
_CONVERGED = {torch.float64: 1e-7, torch.float32: 1e-6}
"""Share of the energy that is not captured: what the columns since the last look have added when the iteration ends."""
_ROUNDING = {torch.float64: 1e-15, torch.float32: 1e-10}
"""Share of the whole energy: what the captured energy is exact to."""
_WHOLE_SHARE = 0.75
"""Share of the side: a larger basis costs as much as all eigenvectors."""


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """[out, in] numbers on the workshop's device; `side` is the smaller of both."""

    numbers: Tensor
    """float32 or float64."""
    shop: Workshop

    def __post_init__(self) -> None:
        if self.numbers.ndim != 2 or self.numbers.dtype not in _ROUNDING or not self.numbers.numel():
            raise ValueError(f"no dense matrix: {list(self.numbers.shape)} {self.numbers.dtype}")

    @property
    def tall(self) -> bool:
        """More rows than columns."""
        return self.numbers.shape[0] > self.numbers.shape[1]

    @property
    def side(self) -> int:
        return min(self.numbers.shape)

    @property
    def _standing(self) -> Tensor:
        """A view with no more columns than rows."""
        return self.numbers if self.tall else self.numbers.T

    def across(self, x: Tensor) -> Tensor:
        """Product from the smaller side to the larger: [side, n] float64 to [other side, n] in the matrix' dtype.
        Inside a turn."""
        narrow = x.to(self.numbers.dtype)
        out = narrow.new_empty(max(self.numbers.shape), x.shape[1])
        for rows in self.shop.pieces(self._standing.shape):
            torch.mm(self._standing[rows], narrow, out=out[rows])
        return out

    def gram_times(self, x: Tensor) -> Tensor:
        """[side, n] float64: the product with MᵀM or MMᵀ, whichever is smaller. Reads each number once. Inside a
        turn."""
        narrow = x.to(self.numbers.dtype)
        total = torch.zeros(x.shape[1], self.side, dtype=torch.float64, device=x.device)
        for rows in self.shop.pieces(self._standing.shape):
            piece = self._standing[rows]
            total += (piece @ narrow).T @ piece
        return total.T

    def gram(self) -> Tensor:
        """[side, side] float64, exact. Takes a turn."""
        with self.shop.turn():
            total = torch.zeros(self.side, self.side, dtype=torch.float64, device=self.numbers.device)
            for rows in self.shop.pieces(self._standing.shape):
                piece = self._standing[rows].double()
                total.addmm_(piece.T, piece)
        return total

    def energy(self) -> float:
        """The square of the Frobenius norm. Takes a turn."""
        with self.shop.turn():
            total = torch.zeros((), dtype=torch.float64, device=self.numbers.device)
            for rows in self.shop.pieces(self.numbers.shape):
                total += torch.linalg.vector_norm(self.numbers[rows], dtype=torch.float64).square()
        return float(total)


def leading(matrix: DenseMatrix, count: int) -> Tensor:
    """[side, count] float64 on the matrix' device, orthonormal, the largest first: what a matrix of that rank keeps.

    Of a large matrix by block Krylov iteration (Musco and Musco, arXiv 1504.05477) with full reorthogonalization, until
    what more it could capture does not matter; it needs no gap between singular values. Always the same start, so the
    same result. A small matrix, or one that the iteration does not finish, gets all eigenvectors of its Gram matrix.
    """
    found = _iterated(matrix, count)
    if found is None:
        gram = matrix.gram().cpu()
        with matrix.shop.host():
            found = torch.linalg.eigh(gram).eigenvectors[:, -count:].flip(1)
        found = found.to(matrix.numbers.device)
    return found


def _iterated(matrix: DenseMatrix, count: int) -> Tensor | None:
    """None: the basis would become too large."""
    shop, side, device = matrix.shop, matrix.side, matrix.numbers.device
    width = count + _OVERSAMPLING
    look = max(1, _LOOK_COLUMNS // width) * width
    most = int(_WHOLE_SHARE * side) // width * width
    if most < 2 * look:
        return None
    energy, captured = matrix.energy(), 0.0
    enough, rounding = _CONVERGED[matrix.numbers.dtype], _ROUNDING[matrix.numbers.dtype] * energy
    with shop.host():
        start = torch.randn(side, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        block = torch.linalg.qr(start).Q
        projected = torch.zeros(most, most, dtype=torch.float64)
    basis = torch.empty(side, most, dtype=torch.float64, device=device)
    used = 0
    while used + width <= most:
        block = block.to(device)
        with shop.turn():
            basis[:, used : used + width] = block
            known = basis[:, : used + width]
            image = matrix.gram_times(known[:, used:])
            coefficients = known.T @ image
            image -= known @ coefficients
        used += width
        rows = coefficients.cpu()
        projected[:used, used - width : used] = rows
        projected[used - width : used, :used] = rows.T
        block = _orthogonal(image, known, shop)
        if used % look:
            continue
        with shop.host():
            values = torch.linalg.eigvalsh(projected[:used, :used])
        before, captured = captured, float(values[-count:].sum())
        if captured - before <= max(enough * (energy - captured), rounding):
            with shop.host():
                vectors = torch.linalg.eigh(projected[:used, :used]).eigenvectors[:, -count:].flip(1)
            vectors = vectors.to(device)
            with shop.turn():
                found: Tensor = known @ vectors
            return found
    return None


def _orthogonal(block: Tensor, basis: Tensor, shop: Workshop) -> Tensor:
    """[side, width] on the CPU: orthonormal, and orthogonal to a basis that the block has been freed of once. Where the
    block has nothing new to say its rounding errors do, which the second pass frees of the basis as well."""
    small = block.cpu()
    with shop.host():
        small = torch.linalg.qr(small).Q
    again = small.to(basis.device)
    with shop.turn():
        again = again - basis @ (basis.T @ again)
    small = again.cpu()
    with shop.host():
        found: Tensor = torch.linalg.qr(small).Q
    return found
