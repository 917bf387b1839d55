"""Weight matrices of the CUDA path: what a linear layer multiplies with, whatever its storage.

A product of few rows (skinny_configs.most_rows) streams the weight through `kernels.gpu.skinny`; more rows go to the
vendor's matrix product (dense, int4) or to the float8 product of `kernels.gpu.fp8`, with the norm and the activation as
kernels of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from services.common.errors import InvalidRequest

if TYPE_CHECKING:
    from kernels.gpu.lora import LoraRows
    from kernels.gpu.skinny import Norm, SplitWorkspace, Weight


class Matrix(ABC):
    """[out, in]: the weight of one or more linear layers that share their input."""

    __slots__ = ()

    weight: Weight
    workspace: SplitWorkspace | None
    """Shared by all matrices of one stream; None allocates at each product that needs it."""
    invariant: bool
    """Every product by one fixed cut, whatever the number of rows: a row's bits depend on that row alone."""

    @property
    def shape(self) -> tuple[int, int]:
        out, inputs = self.weight.shape
        return out, inputs

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[out, in] in the model's dtype; decoded anew at every call if quantized."""

    @abstractmethod
    def product(self, x: Tensor, into: Tensor | None, *, pdl: bool) -> Tensor:
        """``x Wᵀ`` of many rows, or ``into`` with it added."""

    def project(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        swiglu: bool = False,
        lora: LoraRows | None = None,
        out: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """``activation(norm(x) Wᵀ + adapters) + residual``.

        Args:
            x: [T, in] model dtype, on a CUDA device (or in Triton's interpreter).
            norm: RMSNorm of x, applied first.
            residual: [T, out], added last. Not together with swiglu.
            swiglu: rows are gate | up; the result is ``silu(gate) · up``, half as wide.
            lora: each row's adapter, added to the product.
            out: where to write; may be ``residual``.
            pdl: let kernels start before those ahead have finished.

        Returns:
            [T, out], or [T, out / 2] with swiglu.
        """
        from kernels.gpu.products import few_rows, many_rows, streams

        if streams(x, self.weight, self.invariant):
            return few_rows(
                x, self.weight, norm, residual, swiglu, lora, out, self.workspace, invariant=self.invariant, pdl=pdl
            )
        return many_rows(x, partial(self.product, pdl=pdl), norm, residual, swiglu, lora, out, pdl=pdl)


@dataclass(frozen=True, slots=True)
class DenseMatrix(Matrix):
    """In the model's dtype."""

    weight: Tensor
    """[out, in] contiguous."""
    workspace: SplitWorkspace | None = None
    invariant: bool = False

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def dense(self) -> Tensor:
        return self.weight

    def product(self, x: Tensor, into: Tensor | None, *, pdl: bool) -> Tensor:
        del pdl  # torch's kernels wait for those ahead
        return _dense_product(x, self.weight, into)


@dataclass(frozen=True, slots=True)
class Fp8Matrix(Matrix):
    """float8_e4m3fn with a scale for each row; activations are quantized by row where there are many of them."""

    weight: Fp8Weight
    dtype: torch.dtype
    workspace: SplitWorkspace | None = None
    invariant: bool = False

    @property
    def nbytes(self) -> int:
        return _bytes(self.weight)

    def dense(self) -> Tensor:
        return dequantize_fp8(self.weight, self.dtype)

    def product(self, x: Tensor, into: Tensor | None, *, pdl: bool) -> Tensor:
        from kernels.gpu.fp8 import fp8_linear, quantize_rows

        values, scale = quantize_rows(x, pdl=pdl)
        return fp8_linear(values, scale, self.weight, out_dtype=x.dtype, residual=into, out=into, pdl=pdl)


@dataclass(frozen=True, slots=True)
class Int4Matrix(Matrix):
    """4 bits with a scale and a zero point for each row and 128 inputs; many rows multiply with a decoded copy."""

    weight: Int4Weight
    dtype: torch.dtype
    workspace: SplitWorkspace | None = None
    invariant: bool = False

    @property
    def nbytes(self) -> int:
        return _bytes(self.weight)

    def dense(self) -> Tensor:
        return dequantize_int4(self.weight, self.dtype)

    def product(self, x: Tensor, into: Tensor | None, *, pdl: bool) -> Tensor:
        from kernels.gpu.int4 import dequantize

        del pdl  # torch's kernels wait for those ahead
        return _dense_product(x, dequantize(self.weight, x.dtype), into)


def quantize(
    weight: Tensor, kind: str, *, workspace: SplitWorkspace | None = None, invariant: bool = False
) -> DenseMatrix | Fp8Matrix | Int4Matrix:
    """A matrix of the kind of TEMPER_QUANTIZATION.

    Args:
        weight: [out, in] in the model's dtype.
        kind: "none", "fp8" or "int4".

    Raises:
        InvalidRequest: another kind, or a number of inputs that it cannot group.
    """
    if kind == "none":
        return DenseMatrix(weight, workspace, invariant)
    if kind not in ("fp8", "int4"):
        raise InvalidRequest(f"quantization must be none, fp8 or int4, got {kind!r}", param="quantization")
    try:
        if kind == "fp8":
            return Fp8Matrix(quantize_fp8(weight), weight.dtype, workspace, invariant)
        return Int4Matrix(quantize_int4(weight), weight.dtype, workspace, invariant)
    except ValueError as error:
        raise InvalidRequest(str(error), param="quantization") from None


def _bytes(weight: Fp8Weight | Int4Weight) -> int:
    return sum(x.numel() * x.element_size() for x in weight.tensors())


def _dense_product(x: Tensor, weight: Tensor, into: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if into is None else into.addmm_(x, weight.t())
