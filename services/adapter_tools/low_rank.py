"""Matrices as products of thin factors, and the nearest one of a lower rank.

Factors are float64 on the CPU: what a merge loses is what its rank cuts off, and that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.adapter_tools.singular import DenseMatrix, leading
from services.adapter_tools.workshop import ALONE, Workshop


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


def nearest(matrix: Tensor, rank: int, shop: Workshop = ALONE) -> Factors:
    """The nearest matrix of at most ``rank`` to a dense one: its squared distance within a millionth of the smallest
    possible, or within 1e-10 of the matrix' squared norm (of a float64 one 1e-15), which is what rounding hides.

    By the leading singular vectors of its smaller side: a fraction of an SVD's time.

    Args:
        matrix: [out, in] float64 or float32, on the shop's device.
        shop: where it is computed.
    """
    dense = DenseMatrix(matrix, shop)
    thin = leading(dense, min(rank, dense.side))
    with shop.turn():
        image = dense.across(thin)
    near, far = thin.cpu(), image.cpu().double()
    with shop.host():
        sigma = far.norm(dim=0)
        far = far / torch.where(sigma > 0, sigma, 1.0)
        return _balanced(far, sigma, near.T) if dense.tall else _balanced(near, sigma, far.T)


def _balanced(u: Tensor, sigma: Tensor, vh: Tensor) -> Factors:
    """Half of each singular value on either side, so that neither factor loses digits as float32."""
    root = sigma.sqrt()
    return Factors(a=root.unsqueeze(1) * vh, b=u * root)
