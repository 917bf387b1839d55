"""Weight matrices of the CUDA path: what a linear layer multiplies with, whatever its storage.

A product of few rows (skinny_configs.most_rows) streams the weight through `kernels.gpu.linear.skinny`; more rows go to
the vendor's matrix product (dense, int4) or to the float8 product of `kernels.gpu.linear.fp8`, with the norm and the
activation as kernels of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from services.common.errors import InvalidRequest
from services.engine.models.residual import Residual

if TYPE_CHECKING:
    from kernels.gpu.configs import KernelConfigs
    from kernels.gpu.linear.skinny import Convolution, Norm, SplitWorkspace, Weight
    from kernels.gpu.lora.rows import LoraRows


_PIECE = 4096
_WIDE = 16384
"""A product with more outputs than this takes so many rows at a time: the 18,432 of gate and up 1,184 µs for 8,192 rows
on an H200 instead of 1,238; narrower ones are faster whole."""


class Matrix(ABC):
    """[out, in]: the weight of one or more linear layers that share their input."""

    __slots__ = ()

    weight: Weight
    workspace: SplitWorkspace | None
    """Shared by all matrices of one stream; None allocates at each product that needs it."""
    invariant: bool
    """Every product by one fixed cut, whatever the number of rows: a row's bits depend on that row alone."""
    kernels: KernelConfigs | None
    """Shared by all matrices of a model; None: those that fit the weight's device."""

    @property
    def shape(self) -> tuple[int, int]:
        out, inputs = self.weight.shape
        return out, inputs

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        tensors = (self.weight,) if isinstance(self.weight, Tensor) else self.weight.tensors()
        return sum(tensor.nbytes for tensor in tensors)

    @abstractmethod
    def dense(self) -> Tensor:
        """[out, in] in the model's dtype; decoded anew at every call if quantized."""

    @property
    def configs(self) -> KernelConfigs:
        """Configurations of the kernels that multiply with this matrix."""
        from kernels.gpu.configs import KernelConfigs

        weight = self.weight if isinstance(self.weight, Tensor) else self.weight.tensors()[0]
        return self.kernels or KernelConfigs.on(weight.device)

    @abstractmethod
    def part(self, rows: slice) -> Tensor:
        """Rows of dense(), without the others being decoded."""

    def few(self, rows: int) -> bool:
        """True if a product of ``rows`` rows streams the weight."""
        return self.invariant or self.configs.streams(rows, self.weight)

    def convolves(self, rows: int) -> bool:
        """True if a product of ``rows`` rows computes a convolution as well."""
        from kernels.gpu.linear.products import MOST_CONVOLVED

        return rows <= MOST_CONVOLVED and self.few(rows)

    def of_prompts(self) -> Matrix:
        """What rows of prompts are multiplied with, where there are enough of them."""
        return self

    @abstractmethod
    def product(self, x: Tensor, *, out: Tensor | None = None, pdl: bool) -> Tensor:
        """``x Wᵀ`` of many rows, in x's dtype.

        Args:
            out: where to write; None: a fresh tensor.
        """

    def product_onto(self, stream: Residual, x: Tensor, *, pdl: bool) -> Tensor:
        """``stream += x Wᵀ`` of many rows. Returns the tensor that it went into, for more to be added there."""
        addend = self.product(x, pdl=pdl)
        stream.leave(addend)
        return addend

    def project(
        self,
        x: Tensor | Residual,
        *,
        norm: Norm | None = None,
        swiglu: bool = False,
        lora: LoraRows | None = None,
        conv: Convolution | None = None,
        out: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """``activation(norm(x) Wᵀ + adapters)``.

        Args:
            x: [T, in] model dtype, on a CUDA device (or in Triton's interpreter).
            norm: RMSNorm of x, applied first; needed with a residual stream.
            swiglu: rows are gate | up; the result is ``silu(gate) · up``, half as wide.
            lora: each row's adapter, added to the product.
            conv: what becomes of the first columns; only with as many rows as convolves() says.
            out: [T, out], where to write; not with swiglu. None: a fresh tensor.
            pdl: let kernels start before those ahead have finished.

        Returns:
            [T, out], or [T, out / 2] with swiglu.
        """
        from kernels.gpu.linear.products import finished, normed
        from kernels.gpu.linear.skinny import skinny_linear

        if conv is not None and not self.convolves(x.shape[0]):
            raise ValueError(f"a product of {x.shape[0]} rows does not convolve")
        if self.few(x.shape[0]):
            given = x.ready(norm) if isinstance(x, Residual) else x
            return skinny_linear(
                given,
                self.weight,
                norm=norm if isinstance(given, Tensor) else None,
                swiglu=swiglu,
                lora=lora,
                conv=conv,
                out=out,
                config=self.configs.product(x.shape[0], self.weight, swiglu=swiglu),
                invariant=self.invariant,
                workspace=self.workspace,
                device=self.configs.device,
                pdl=pdl,
            )
        rows, addend = x.take() if isinstance(x, Residual) else (x, None)
        inputs = normed(rows, norm, addend, pdl=pdl)
        result = self.product(inputs, out=out, pdl=pdl)
        return finished(result, inputs, swiglu=swiglu, lora=lora, device=self.configs.device, pdl=pdl)

    def add_to(
        self,
        stream: Residual,
        x: Tensor,
        *,
        ahead: tuple[Norm, Matrix] | None = None,
        lora: LoraRows | None = None,
        pdl: bool = False,
    ) -> None:
        """``stream += x Wᵀ + adapters``; arguments as of project().

        Args:
            ahead: the norm that reads the stream next and the matrix that it is multiplied with then: if that matrix
                takes so few rows, the stream is made ready for it in passing.
        """
        from kernels.gpu.linear.products import finished
        from kernels.gpu.linear.skinny import skinny_add

        rows = x.shape[0]
        if self.few(rows):
            norm = ahead[0] if ahead is not None and ahead[1].few(rows) else None
            made = skinny_add(
                stream.settled(),
                x,
                self.weight,
                lora=lora,
                ahead=norm,
                config=self.configs.product(rows, self.weight, swiglu=False),
                invariant=self.invariant,
                workspace=self.workspace,
                device=self.configs.device,
                pdl=pdl,
            )
            stream.added(norm, made)
        else:
            finished(self.product_onto(stream, x, pdl=pdl), x, lora=lora, device=self.configs.device, pdl=pdl)


@dataclass(frozen=True, slots=True)
class DenseMatrix(Matrix):
    """Weight matrix in the model's dtype."""

    weight: Tensor
    """[out, in] contiguous."""
    workspace: SplitWorkspace | None = None
    invariant: bool = False
    kernels: KernelConfigs | None = None
    float8: Fp8Matrix | None = None
    """Copy for rows of prompts; None: they are multiplied with the weight itself."""

    def of_prompts(self) -> Matrix:
        return self if self.float8 is None else self.float8

    def dense(self) -> Tensor:
        return self.weight

    def part(self, rows: slice) -> Tensor:
        return self.weight[rows]

    def product(self, x: Tensor, *, out: Tensor | None = None, pdl: bool) -> Tensor:
        del pdl  # torch's kernels wait for those ahead
        if len(x) <= _PIECE or len(self.weight) < _WIDE:
            return torch.mm(x, self.weight.t(), out=out)
        result = torch.empty(len(x), len(self.weight), dtype=x.dtype, device=x.device) if out is None else out
        for begin in range(0, len(x), _PIECE):
            torch.mm(x[begin : begin + _PIECE], self.weight.t(), out=result[begin : begin + _PIECE])
        return result


@dataclass(frozen=True, slots=True)
class Fp8Matrix(Matrix):
    """float8_e4m3fn with a scale for each row; activations are quantized by row where there are many of them."""

    weight: Fp8Weight
    dtype: torch.dtype
    workspace: SplitWorkspace | None = None
    invariant: bool = False
    kernels: KernelConfigs | None = None

    def dense(self) -> Tensor:
        return dequantize_fp8(self.weight, self.dtype)

    def part(self, rows: slice) -> Tensor:
        return dequantize_fp8(Fp8Weight(self.weight.values[rows], self.weight.scale[rows]), self.dtype)

    def product(self, x: Tensor, *, out: Tensor | None = None, pdl: bool) -> Tensor:
        return self._product(x, None, out, pdl)

    def product_onto(self, stream: Residual, x: Tensor, *, pdl: bool) -> Tensor:
        onto = stream.settled()
        return self._product(x, onto, onto, pdl)  # which costs a product of our own nothing

    def _product(self, x: Tensor, residual: Tensor | None, out: Tensor | None, pdl: bool) -> Tensor:
        from kernels.gpu.linear.fp8 import fp8_linear, quantize_rows

        values, scale = quantize_rows(x, pdl=pdl)
        return fp8_linear(
            values,
            scale,
            self.weight,
            out_dtype=x.dtype,
            residual=residual,
            out=out,
            device=self.configs.device,
            pdl=pdl,
        )


@dataclass(frozen=True, slots=True)
class Int4Matrix(Matrix):
    """4 bits with a scale and a zero point for each row and 128 inputs; many rows multiply with a decoded copy."""

    weight: Int4Weight
    dtype: torch.dtype
    workspace: SplitWorkspace | None = None
    invariant: bool = False
    kernels: KernelConfigs | None = None

    def dense(self) -> Tensor:
        return dequantize_int4(self.weight, self.dtype)

    def part(self, rows: slice) -> Tensor:
        packed, scale, zero = (tensor[:, rows] for tensor in self.weight.tensors())
        return dequantize_int4(Int4Weight(packed, scale, zero), self.dtype)

    def product(self, x: Tensor, *, out: Tensor | None = None, pdl: bool) -> Tensor:
        from kernels.gpu.linear.int4 import dequantize

        del pdl  # torch's kernels wait for those ahead
        return torch.mm(x, dequantize(self.weight, x.dtype).t(), out=out)


def quantize(
    weight: Tensor,
    kind: str,
    *,
    workspace: SplitWorkspace | None = None,
    invariant: bool = False,
    kernels: KernelConfigs | None = None,
    least: Tensor | None = None,
    prompts: bool = False,
) -> DenseMatrix | Fp8Matrix | Int4Matrix:
    """A matrix of the kind of TEMPER_QUANTIZATION.

    Args:
        weight: [out, in] in the model's dtype.
        kind: "none", "fp8" or "int4".
        least: [out] float32, smallest scale of each row in fp8 (kernels.quantize.quantize_fp8).
        prompts: with a copy in fp8 for rows of prompts, of kind "none".

    Raises:
        InvalidRequest: another kind, or a number of inputs that it cannot group.
    """
    if kind == "none":
        copy = Fp8Matrix(quantize_fp8(weight, least), weight.dtype, workspace, kernels=kernels) if prompts else None
        return DenseMatrix(weight, workspace, invariant, kernels, copy)
    if kind not in ("fp8", "int4"):
        raise InvalidRequest(f"quantization must be none, fp8 or int4, got {kind!r}", param="quantization")
    try:
        if kind == "fp8":
            return Fp8Matrix(quantize_fp8(weight, least), weight.dtype, workspace, invariant, kernels)
        return Int4Matrix(quantize_int4(weight), weight.dtype, workspace, invariant, kernels)
    except ValueError as error:
        raise InvalidRequest(str(error), param="quantization") from None
