"""What surrounds products of many rows, which `kernels.gpu.linear.skinny` does not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.gpu.linear.skinny import Norm

if TYPE_CHECKING:
    from kernels.gpu.launch.device import DeviceLimits
    from kernels.gpu.lora.rows import LoraRows

MOST_CONVOLVED = 32
"""Most rows of a product with a convolution: beside a tile of 64, the rows' old inputs do not fit the registers."""


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
    result: Tensor,
    inputs: Tensor,
    *,
    swiglu: bool = False,
    lora: LoraRows | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """Epilogue of a product of many rows: adapters, added in place, and the activation.

    Args:
        result: [T, N], what the product of ``inputs`` [T, K] gave or was added to.
    """
    from kernels.gpu.activations import swiglu as activation

    if lora is not None:
        from kernels.gpu.linear.preparation import shrink
        from kernels.gpu.lora.expand import expand_add, expand_swiglu

        hidden = shrink(inputs, lora, device=device, pdl=pdl)
        if swiglu:
            return expand_swiglu(hidden, lora, result, pdl=pdl)
        expand_add(hidden, lora, result, pdl=pdl)
    return activation(result, pdl=pdl) if swiglu else result
