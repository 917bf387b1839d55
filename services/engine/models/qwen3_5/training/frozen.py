"""Products with the frozen weights of a layer in a training step on the GPU: in the model's dtype, or in float8.

In float8 both factors are rounded to e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433):
activations and gradients by row, as they come, weights by row of the matrix that is multiplied with, once. A backward
multiplies with the transposed matrix, whose rows are others, so each weight is there twice. What is trained, norms,
convolutions, recurrence and attention stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.fp8 import fp8_linear, quantize_rows
from kernels.quantize import GROUP, Fp8Weight, quantize_fp8
from services.engine.models.qwen3_5.weights import LayerWeights
from services.engine.models.weights.matrix import DenseMatrix, Fp8Matrix, Matrix


class FrozenLinear(Protocol):
    """A linear layer whose weight W [out, in] is not trained, in both directions."""

    def product(self, x: Tensor, addend: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """``x Wᵀ + addend``, [T, out].

        Args:
            x: [T, in].
            in_place: the result goes where ``addend`` is.
        """
        ...

    def input_grad(self, grad: Tensor, addend: Tensor | None = None) -> Tensor:
        """``grad W + addend``, [T, in]: the gradient in the input of that in the output. Goes where ``addend`` is."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """In the model's dtype; a quantized weight is decoded for each product. Implements FrozenLinear."""

    weight: Matrix

    def product(self, x: Tensor, addend: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """See FrozenLinear."""
        if addend is None:
            weight = self.weight
            return weight.product(x, pdl=False) if isinstance(weight, DenseMatrix) else F.linear(x, weight.dense())
        factor = self.weight.dense().t()
        return addend.addmm_(x, factor) if in_place else torch.addmm(addend, x, factor)

    def input_grad(self, grad: Tensor, addend: Tensor | None = None) -> Tensor:
        """See FrozenLinear."""
        weight = self.weight.dense()
        return torch.mm(grad, weight) if addend is None else addend.addmm_(grad, weight)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    """In float8. Implements FrozenLinear.

    Raises:
        ValueError: the parts are of different matrices.
    """

    forward: Fp8Weight
    """[out, in]."""
    backward: Fp8Weight
    """[in, out] without what is in ``rest``."""
    rest: Tensor | None
    """[out % 128, in] in the model's dtype: the last outputs, where a product in float8 would not take them as inputs;
    None: there are none."""
    device: DeviceLimits

    def __post_init__(self) -> None:
        (out, inputs), rest = self.forward.shape, 0 if self.rest is None else len(self.rest)
        if self.backward.shape != (inputs, out - rest):
            raise ValueError(
                f"a weight of {out} x {inputs} and a transposed one of {self.backward.shape} beside {rest}"
            )

    @classmethod
    def of(cls, matrix: Matrix, device: DeviceLimits) -> Float8Linear:
        """A matrix in float8, in both directions.

        Raises:
            ValueError: its inputs are not a multiple of 128.
        """
        weight = matrix.dense()
        whole = len(weight) // GROUP * GROUP
        stored = matrix.of_prompts()  # in float8 already, if there is a copy for prompts
        forward = stored.weight if isinstance(stored, Fp8Matrix) else quantize_fp8(weight)
        rest = weight[whole:].clone() if whole < len(weight) else None
        return cls(forward, quantize_fp8(weight[:whole].t()), rest, device)

    def product(self, x: Tensor, addend: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """See FrozenLinear."""
        return self._product(x, self.forward, addend, in_place=in_place)

    def input_grad(self, grad: Tensor, addend: Tensor | None = None) -> Tensor:
        """See FrozenLinear."""
        whole = self.backward.shape[1]
        if self.rest is not None:
            last = grad[:, whole:]
            addend = torch.mm(last, self.rest) if addend is None else addend.addmm_(last, self.rest)
        return self._product(grad[:, :whole], self.backward, addend, in_place=True)

    def _product(self, x: Tensor, weight: Fp8Weight, addend: Tensor | None, *, in_place: bool) -> Tensor:
        values, scale = quantize_rows(x)
        out = addend if in_place else None
        return fp8_linear(values, scale, weight, residual=addend, out=out, out_dtype=x.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class FrozenLinears:
    """The linear layers of a decoder layer, those that share an input as one."""

    mixer_in: FrozenLinear
    mixer_out: FrozenLinear
    gate_up: FrozenLinear
    down: FrozenLinear

    @classmethod
    def dense(cls, weights: LayerWeights) -> FrozenLinears:
        """In the model's dtype."""
        return cls(*map(DenseLinear, matrices(weights)))

    @classmethod
    def float8(cls, weights: LayerWeights, device: DeviceLimits) -> FrozenLinears:
        """In float8. Raises ValueError as Float8Linear.of()."""
        return cls(*(Float8Linear.of(matrix, device) for matrix in matrices(weights)))


def matrices(weights: LayerWeights) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """A layer's matrices, in the order of FrozenLinears."""
    return weights.mixer.in_proj, weights.mixer.out_proj, weights.gate_up, weights.down
