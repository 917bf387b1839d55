"""Experts of a layer: from the router's scores to what they add to the residual stream. Reference:
`kernels.experts.pass_through`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.experts.configs import Cut, Grouped, Streamed
from kernels.gpu.experts.grouped import grouped_product
from kernels.gpu.experts.groups import group
from kernels.gpu.experts.routing import Routes
from kernels.gpu.experts.stack import Stack
from kernels.gpu.experts.streamed import streamed_down_kernel, streamed_gate_up_kernel
from kernels.gpu.linear.fp8 import quantize_rows
from kernels.gpu.linear.skinny import KINDS, Norm, Scaled, Weight, weight_kind
from kernels.gpu.linear.skinny_parts import Around, finish

_COMBINED = 512
"""Columns of a program that adds up a token's experts."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Weights of the experts of a layer.

    Raises:
        ValueError: the shapes or kinds contradict each other.
    """

    gate_up: Weight
    """[experts · 2 · size, hidden]."""
    down: Weight
    """[experts · hidden, size]."""
    shared: tuple[Weight, Weight] | None = None
    """The same of the shared expert, if it is one of those that are chosen: of the same size and kind."""

    def __post_init__(self) -> None:
        kinds = {weight_kind(weight) for weight in (self.gate_up, self.down, *(self.shared or ()))}
        if len(kinds) > 1:
            raise ValueError(f"experts: all matrices must be of one kind, got {sorted(kinds)}")
        for weight in (self.gate_up, self.down):
            if isinstance(weight, Tensor) and not weight.is_contiguous():
                raise ValueError("experts: matrices must be contiguous")


def pass_experts(
    stream: Tensor,
    x: Tensor | Scaled,
    routes: Routes,
    matrices: ExpertMatrices,
    cut: Cut,
    *,
    ahead: Norm | None = None,
    pdl: bool = False,
) -> Scaled | None:
    """Adds to the stream, in place, the weighted sum of what its experts make of each token.

    Args:
        stream: [T, hidden].
        x: [T, hidden], the norm of the stream, or rows on their way through it.
        routes: of route().
        cut: of kernels.gpu.experts.configs.
        ahead: the norm that reads the stream next.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        The new stream made ready for that norm; None without one.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, hidden = stream.shape
    shared = matrices.shared is not None
    experts = routes.count - shared
    if x.shape != (rows, hidden) or routes.rows != rows or matrices.down.shape[0] != experts * hidden:
        raise ValueError(f"experts: {routes.rows} routed rows and x {tuple(x.shape)} do not fit {tuple(stream.shape)}")
    block = cut.down.block_n if isinstance(cut, Streamed) else min(_COMBINED, triton.next_power_of_2(hidden))
    made = None
    if ahead is not None:
        made = Scaled(
            torch.empty(rows, hidden, dtype=stream.dtype, device=stream.device),
            torch.empty(triton.cdiv(hidden, block), rows, dtype=torch.float32, device=stream.device),
            ahead.eps,
        )
    if rows == 0:
        return made
    around = Around(
        None,
        0.0,
        stream,
        stream.stride(0),
        stream,
        stream.stride(0),
        None if ahead is None else ahead.weight,
        None if made is None else made.values,
        None if made is None else made.squares,
    )
    if isinstance(cut, Streamed):
        _streamed(x, routes, matrices, cut, around, rows, pdl)
        return made
    parts = _grouped(x, routes, matrices, cut, pdl)
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        parts, around, rows, hidden, CHOSEN=routes.chosen, BLOCK_N=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return made


def _streamed(
    x: Tensor | Scaled, routes: Routes, matrices: ExpertMatrices, cut: Streamed, around: Around, rows: int, pdl: bool
) -> None:
    source = x.values if isinstance(x, Scaled) else x
    shared = matrices.shared or (None, None)
    experts = routes.count - (matrices.shared is not None)
    outputs, hidden = matrices.gate_up.shape[0] // experts, matrices.gate_up.shape[1]
    active = torch.empty(rows * routes.chosen, outputs // 2, dtype=source.dtype, device=source.device)
    constants: dict[str, Any] = {
        "EXPERTS": experts,
        "CHOSEN": routes.chosen,
        "KIND": KINDS[weight_kind(matrices.gate_up)],
        "INTERPRETED": triton.knobs.runtime.interpret,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    squares, eps = (x.squares, x.eps) if isinstance(x, Scaled) else (None, 0.0)
    streamed_gate_up_kernel[(triton.cdiv(outputs, cut.gate_up.block_n), rows * routes.chosen)](
        source,
        Around(squares, eps, None, 0, active, active.stride(0)),
        routes.experts,
        Stack.of(matrices.gate_up, shared[0]),
        rows,
        source.stride(0),
        K=hidden,
        N=outputs,
        BLOCK_N=cut.gate_up.block_n,
        GROUPS=cut.gate_up.groups,
        PARTS=0 if squares is None else squares.shape[0],
        num_warps=cut.gate_up.warps,
        **constants,
    )
    streamed_down_kernel[(triton.cdiv(hidden, cut.down.block_n), rows)](
        active,
        around,
        routes.experts,
        routes.weights,
        Stack.of(matrices.down, shared[1]),
        rows,
        K=outputs // 2,
        N=hidden,
        BLOCK_N=cut.down.block_n,
        GROUPS=cut.down.groups,
        num_warps=cut.down.warps,
        **constants,
    )


def _grouped(x: Tensor | Scaled, routes: Routes, matrices: ExpertMatrices, cut: Grouped, pdl: bool) -> Tensor:
    """[T · chosen, hidden]: what each expert adds, weighted."""
    dtype = x.values.dtype if isinstance(x, Scaled) else x.dtype
    shared = matrices.shared or (None, None)
    groups = group(routes, pdl=pdl)
    scale = None
    if cut.float8 and isinstance(x, Tensor):
        x, scale = quantize_rows(x, pdl=pdl)
    active = grouped_product(
        x,
        groups,
        matrices.gate_up,
        cut.gate_up,
        shared=shared[0],
        x_scale=scale,
        gather=True,
        swiglu=True,
        out_dtype=dtype,
        pdl=pdl,
    )
    if scale is not None:
        active, scale = quantize_rows(active, pdl=pdl)
    return grouped_product(
        active,
        groups,
        matrices.down,
        cut.down,
        shared=shared[1],
        x_scale=scale,
        weighted=True,
        out_dtype=dtype,
        pdl=pdl,
    )


@triton.jit(do_not_specialize=["M"])
def _combine_kernel(parts, around, M, N, CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Program for BLOCK_N columns of a token."""
    token = tl.program_id(0)
    tile = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(CHOSEN):
        source = parts + (token * CHOSEN + j).to(tl.int64) * N + column
        acc += tl.load(source, mask=column < N, other=0.0).to(tl.float32)
    m = token + tl.arange(0, 1)
    finish(acc[None, :], None, None, around, tile, m, M, N, N, BLOCK_N, 1, False, 0)


def combine(parts: Tensor, rows: int, *, onto: Tensor | None = None) -> Tensor:
    """The sum of each token's parts, [rows · chosen, N] to [rows, N]; added to ``onto`` in place if there is one."""
    width = parts.shape[1]
    out = torch.empty(rows, width, dtype=parts.dtype, device=parts.device) if onto is None else onto
    block = min(_COMBINED, triton.next_power_of_2(width))
    around = Around(None, 0.0, onto, 0 if onto is None else onto.stride(0), out, out.stride(0))
    _combine_kernel[(rows, triton.cdiv(width, block))](
        parts, around, rows, width, CHOSEN=len(parts) // rows, BLOCK_N=block, PDL=False, num_warps=4
    )
    return out
