"""A linear layer with what surrounds it, for few rows (one kernel) and for many (a product between kernels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.gpu.skinny import Norm, SplitWorkspace, Weight, skinny_linear, weight_kind
from kernels.gpu.skinny_configs import invariant as invariant_config
from kernels.gpu.skinny_configs import most_rows

if TYPE_CHECKING:
    from kernels.gpu.lora import LoraRows


def streams(x: Tensor, weight: Weight, invariant: bool) -> bool:
    """Whether the product of these rows goes through `skinny_linear`."""
    outputs, inputs = weight.shape
    return invariant or x.shape[0] <= most_rows(outputs, inputs, weight_kind(weight))


def few_rows(
    x: Tensor,
    weight: Weight,
    norm: Norm | None,
    residual: Tensor | None,
    swiglu: bool,
    lora: LoraRows | None,
    out: Tensor | None,
    workspace: SplitWorkspace | None,
    *,
    invariant: bool,
    pdl: bool,
) -> Tensor:
    """`skinny_linear`, cut up by the table or, with ``invariant``, in the one way for all numbers of rows."""
    config, block_m = invariant_config() if invariant else (None, None)
    return skinny_linear(
        x,
        weight,
        norm=norm,
        residual=residual,
        swiglu=swiglu,
        lora=lora,
        out=out,
        config=config,
        block_m=block_m,
        workspace=workspace,
        pdl=pdl,
    )


def many_rows(
    x: Tensor,
    product: Callable[[Tensor, Tensor | None], Tensor],
    norm: Norm | None,
    residual: Tensor | None,
    swiglu: bool,
    lora: LoraRows | None,
    out: Tensor | None,
    *,
    pdl: bool,
) -> Tensor:
    """Norm, product, adapters and activation one after the other.

    Args:
        product: (inputs [T, K], into) to ``inputs Wᵀ`` [T, N], or to ``into`` with the product added.
    """
    from kernels.gpu.activations import swiglu as activation
    from kernels.gpu.rms_norm import rms_norm

    inputs = x if norm is None else rms_norm(x, norm.weight, norm.eps, pdl=pdl)
    into = residual
    if residual is not None and residual is not out:
        into = residual.clone() if out is None else out.copy_(residual)
    result = product(inputs, into)
    if lora is not None:
        from kernels.gpu.lora import expand_add, shrink

        expand_add(shrink(inputs, lora, pdl=pdl), lora, result, pdl=pdl)
    if swiglu:
        return activation(result, out=out, pdl=pdl)
    return result if out is None or result is out else out.copy_(result)
