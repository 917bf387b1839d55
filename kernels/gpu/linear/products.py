"""Products of a linear layer: which `kernels.gpu.linear.skinny` takes, and what surrounds the others, of many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.gpu.linear.skinny import Norm, Weight, weight_kind
from kernels.gpu.linear.skinny_configs import most_rows

if TYPE_CHECKING:
    from kernels.gpu.lora.rows import LoraRows


def streams(rows: int, weight: Weight, invariant: bool) -> bool:
    """True if the product of these rows goes through `skinny_linear`."""
    outputs, inputs = weight.shape
    return invariant or rows <= most_rows(outputs, inputs, weight_kind(weight))


_MOST_CONVOLVED = 32
"""Most rows of a product with a convolution: beside a tile of 64, the rows' old inputs do not fit the registers."""


def convolves(rows: int, weight: Weight, invariant: bool) -> bool:
    """True if a product of ``rows`` rows computes a convolution as well."""
    return rows <= _MOST_CONVOLVED and streams(rows, weight, invariant)


def normed(x: Tensor, norm: Norm | None, addend: Tensor | None, *, pdl: bool) -> Tensor:
    """``norm(x)`` of many rows, after ``x += addend`` in place.

    Raises:
        ValueError: an addend and no norm to add it in passing.
    """
    from kernels.gpu.rms_norm import rms_norm

    if norm is not None:
        return rms_norm(x, norm.weight, norm.eps, addend, pdl=pdl)
    if addend is not None:
        raise ValueError("a residual stream is read through a norm")
    return x


def finished(
    result: Tensor, inputs: Tensor, *, swiglu: bool = False, lora: LoraRows | None = None, pdl: bool = False
) -> Tensor:
    """Epilogue of a product of many rows: adapters, added in place, and the activation.

    Args:
        result: [T, N], what the product of ``inputs`` [T, K] gave or was added to.
    """
    from kernels.gpu.activations import swiglu as activation

    if lora is not None:
        from kernels.gpu.linear.preparation import shrink
        from kernels.gpu.lora.expand import expand_add, expand_swiglu

        hidden = shrink(inputs, lora, pdl=pdl)
        if swiglu:
            return expand_swiglu(hidden, lora, result, pdl=pdl)
        expand_add(hidden, lora, result, pdl=pdl)
    return activation(result, pdl=pdl) if swiglu else result
