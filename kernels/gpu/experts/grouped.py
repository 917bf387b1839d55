"""Products of many tokens with their experts' matrices: each tile is of pairs of one expert. Reference:
`kernels.experts.pass_through`.

The tensor cores multiply with what the weights decode to, or with float8 as it is where x is in float8, too. Each pair
has its own row of the result, so that no two programs add to one; `combine` adds up a token's, in one order.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import inverse_root, silu
from kernels.gpu.experts.configs import GroupTile
from kernels.gpu.experts.groups import Groups, locate
from kernels.gpu.experts.stack import Stack, rows_of, tensor_of
from kernels.gpu.linear.skinny import KINDS, Scaled, Weight, weight_kind
from kernels.gpu.linear.skinny_kernels import product
from kernels.gpu.linear.skinny_parts import DENSE, FP8, GROUP, INT4, weight_rows
from kernels.quantize import Fp8Weight


@triton.jit
def _float8_product(
    x, weight, row, m, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Weight rows [BLOCK_N] times rows m of x [BLOCK_M], both in float8 and in the same order of K."""
    k = tl.arange(0, BLOCK_K)
    left = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    right = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = tl.load(left + start)
        b = tl.load(right + start)
        if INTERPRETED:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["M", "room"])
def _grouped_kernel(
    x,
    x_scale,
    squares,
    eps,
    counts,
    pairs,
    weights,
    stack,
    out,
    M,
    room,
    x_stride,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    PARTS: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of an expert and BLOCK_M of its pairs. COUNT: of experts, the shared one included if it
    is among them. GATHER: x has a row for a token, not for a pair."""
    tile = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, own = locate(counts, tl.program_id(1), COUNT, BLOCK_M)
    if expert < COUNT:
        place = begin + tl.arange(0, BLOCK_M)
        inside = place < own
        pair = tl.load(pairs + expert.to(tl.int64) * room + place, mask=inside, other=0)
        m = tl.where(inside, pair // CHOSEN if GATHER else pair, M)
        first, total = rows_of(stack, expert, EXPERTS, N)
        values = tensor_of(stack.words, stack.shared_words, expert, EXPERTS)
        scale = tensor_of(stack.scale, stack.shared_scale, expert, EXPERTS) if KIND != DENSE else None
        zero = tensor_of(stack.zero, stack.shared_zero, expert, EXPERTS) if KIND == INT4 else None
        row = first + weight_rows(tile, N, BLOCK_N, SWIGLU)
        if FLOAT8:
            acc = _float8_product(x, values, row, m, M, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, INTERPRETED)
            acc *= tl.load(x_scale + m, mask=inside, other=0.0)[None, :]
        else:
            steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
            acc = product(
                x, values, scale, zero, row, m, M, total, 0, x_stride,
                K, KIND, BLOCK_M, BLOCK_N, BLOCK_K, steps, K % BLOCK_K == 0, STAGES, INTERPRETED,
            )  # fmt: skip
        if KIND == FP8:
            acc *= tl.load(scale + row)[:, None]
        if PARTS > 0:
            part = tl.arange(0, triton.next_power_of_2(PARTS))[:, None]
            sums = tl.load(squares + part * M + m[None, :], mask=(part < PARTS) & inside[None, :], other=0.0)
            acc *= inverse_root(tl.sum(sums, axis=0) / K + eps)[None, :]
        result = tl.trans(acc)
        width: tl.constexpr = N // 2 if SWIGLU else N
        columns: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
        if SWIGLU:
            gate, up = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, columns]), [0, 2, 1]))
            result = silu(gate, out.dtype.element_ty) * up
        elif weights is not None:
            result *= tl.load(weights + pair, mask=inside, other=0.0)[:, None]
        column = tile * columns + tl.arange(0, columns)
        target = out + pair.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside[:, None] & (column < width)[None, :])


def grouped_product(
    x: Tensor | Scaled,
    groups: Groups,
    weight: Weight,
    config: GroupTile,
    *,
    shared: Weight | None = None,
    x_scale: Tensor | None = None,
    gather: bool = False,
    swiglu: bool = False,
    weighted: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """The product of each pair's row with the matrix of its expert.

    Args:
        x: [T, K] with ``gather``, else [T · chosen, K]; or rows on their way through a norm. In float8 with ``x_scale``
            [rows] float32, from quantize_rows().
        weight: [experts · N, K].
        shared: [N, K], the matrix of the shared expert, if it is among those of the groups.
        swiglu: rows of each expert are gate | up, and ``silu(gate) · up`` is what is stored.
        weighted: multiplied by the weight of the pair.
        out_dtype: x's dtype if None.

    Returns:
        [T · chosen, N], or [T · chosen, N / 2] with swiglu.

    Raises:
        ValueError: shapes do not fit.
    """
    routes = groups.routes
    source = x.values if isinstance(x, Scaled) else x
    count = routes.count - (shared is not None)
    rows, inputs = source.shape
    outputs, expected = weight.shape[0] // count, weight.shape[1]
    pairs = routes.experts.numel()
    if inputs != expected or rows != (routes.rows if gather else pairs) or source.stride(1) != 1:
        raise ValueError(f"grouped_product: x {tuple(source.shape)} does not fit {pairs} pairs, {outputs} x {expected}")
    float8 = x_scale is not None
    if float8 and not isinstance(weight, Fp8Weight):
        raise ValueError("grouped_product: x in float8 needs weights in float8")
    width = outputs // 2 if swiglu else outputs
    out = torch.empty(pairs, width, dtype=out_dtype or source.dtype, device=source.device)
    kind = weight_kind(weight)
    stack = Stack.of(weight, shared)
    if float8 and isinstance(weight, Fp8Weight):
        stack = stack._replace(words=weight.values)
    if pairs == 0:
        return out
    _grouped_kernel[(triton.cdiv(outputs, config.block_n), groups.tiles(config.block_m))](
        source,
        x_scale,
        x.squares if isinstance(x, Scaled) else None,
        x.eps if isinstance(x, Scaled) else 0.0,
        groups.counts,
        groups.pairs,
        routes.weights if weighted else None,
        stack,
        out,
        rows,
        routes.rows,
        source.stride(0),
        EXPERTS=count,
        COUNT=routes.count,
        CHOSEN=routes.chosen,
        K=inputs,
        N=outputs,
        KIND=KINDS[kind],
        GATHER=gather,
        SWIGLU=swiglu,
        PARTS=x.squares.shape[0] if isinstance(x, Scaled) else 0,
        FLOAT8=float8,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=GROUP.value if kind == "int4" else config.block_k,
        STAGES=config.stages,
        INTERPRETED=triton.knobs.runtime.interpret,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
