"""Matrices as products of thin factors, and the nearest one of a lower rank.

All arithmetic is float64: what a merge loses is what its rank cuts off, and that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_OVERSAMPLING = 8
"""Vectors of a block beyond those that are asked for."""
_BLOCKS = 4
"""Between two looks at how far the iteration is."""
_CONVERGED = 1e-7
"""Of the energy that is not captured: what four more blocks have added when the iteration ends."""
_ROUNDING = 1e-14
"""Of the whole energy: what the sums above are exact to."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrix b @ a."""

    a: Tensor
    """[rank, in] float64."""
    b: Tensor
    """[out, rank] float64."""

    def __post_init__(self) -> None:
        if self.a.ndim != 2 or self.b.ndim != 2 or self.a.shape[0] != self.b.shape[1]:
            raise ValueError(f"factors of shapes {list(self.b.shape)} and {list(self.a.shape)} have no product")

    @property
    def rank(self) -> int:
        """Columns of b; the matrix may have a lower one."""
        return self.a.shape[0]

    def dense(self) -> Tensor:
        """[out, in] float64."""
        return self.b @ self.a

    def norm(self) -> float:
        """Frobenius, without forming the matrix: ‖BA‖² = tr(BᵀB · AAᵀ)."""
        return math.sqrt(max(0.0, float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum())))

    def distance(self, other: Factors) -> float:
        """Frobenius norm of the difference, without forming either matrix; exact to about 1e-8 of the norms."""
        return concatenated([self, Factors(other.a, -other.b)]).norm()

    def rounded(self) -> Factors:
        """What is left when the factors are stored as float32."""
        return Factors(self.a.float().double(), self.b.float().double())


def concatenated(parts: Sequence[Factors]) -> Factors:
    """The sum of the matrices, exactly: its rank is the sum of theirs."""
    return Factors(torch.cat([part.a for part in parts], dim=0), torch.cat([part.b for part in parts], dim=1))


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest matrix of at most ``rank`` (Eckart and Young), from QR of both factors and an SVD of the small core:
    O((out + in) · R²) for R = factors.rank, however large the matrix."""
    q_b, r_b = torch.linalg.qr(factors.b)
    q_a, r_a = torch.linalg.qr(factors.a.T)
    u, sigma, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = min(rank, sigma.numel())
    return _balanced(q_b @ u[:, :kept], sigma[:kept], vh[:kept] @ q_a.T)


def nearest(matrix: Tensor, rank: int) -> Factors:
    """The nearest matrix of at most ``rank`` to a dense [out, in] float64 one, its squared distance within a millionth
    of the smallest possible.

    By the leading eigenvectors of the smaller Gram matrix: a fraction of an SVD's time. Squaring leaves singular values
    below 1e-8 of the largest undetermined, which is far below what float32 factors hold.
    """
    rows, columns = matrix.shape
    kept = min(rank, rows, columns)
    if rows <= columns:
        u = _leading(matrix @ matrix.T, kept)
        projected = u.T @ matrix
        sigma = projected.norm(dim=1)
        return _balanced(u, sigma, _directions(projected, sigma))
    v = _leading(matrix.T @ matrix, kept)
    projected = matrix @ v
    sigma = projected.norm(dim=0)
    return _balanced(_directions(projected.T, sigma).T, sigma, v.T)


def _leading(gram: Tensor, count: int) -> Tensor:
    """[n, count] eigenvectors of the largest eigenvalues, the largest first.

    Of a large matrix by block Krylov iteration (Musco and Musco, arXiv 1504.05477), until what more it could capture
    does not matter: for n = 2560 a tenth of the time of all eigenvectors. Always the same start, so the same result.
    """
    size = gram.shape[0]
    width = count + _OVERSAMPLING
    block = torch.randn(size, width, dtype=gram.dtype, generator=torch.Generator().manual_seed(0))
    basis = block[:, :0]
    image = gram @ basis
    energy, captured = float(gram.diagonal().sum()), 0.0
    while basis.shape[1] + _BLOCKS * width <= size // 3:
        for _ in range(_BLOCKS):
            for _ in range(2):  # the second time removes what rounding left of the basis
                block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
            basis = torch.cat([basis, block], dim=1)
            block = gram @ block
            image = torch.cat([image, block], dim=1)
        found = torch.linalg.eigh(basis.T @ image)
        before, captured = captured, float(found.eigenvalues[-count:].sum())
        if captured - before <= _CONVERGED * max(energy - captured, _ROUNDING * energy):
            leading: Tensor = basis @ found.eigenvectors[:, -count:].flip(1)
            return leading
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors[:, -count:].flip(1)


def _directions(rows: Tensor, lengths: Tensor) -> Tensor:
    return rows / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)


def _balanced(u: Tensor, sigma: Tensor, vh: Tensor) -> Factors:
    """Half of each singular value on either side, so that neither factor loses digits as float32."""
    root = sigma.sqrt()
    return Factors(a=root.unsqueeze(1) * vh, b=u * root)
