"""Gradients through experts whose weights stay as they are: in their inputs, their activations and their weights in
the sum. Reference: autograd through `kernels.experts.pass_through`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import sigmoid
from kernels.gpu.experts.configs import GroupTile
from kernels.gpu.experts.groups import Groups, locate
from kernels.gpu.linear.skinny import KINDS, Weight, parts_of, weight_kind
from kernels.gpu.linear.skinny_parts import FP8, GROUP, INT4, unpack


@triton.jit
def _decoded(
    values, scale, zero, row, inside, total, group, K: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Weight rows [rows, 128], their 128 inputs of a group in the order of _columns(); of float8 without the scale."""
    parts: tl.constexpr = 4 if KIND == INT4 else (2 if KIND == FP8 else 1)
    words: tl.constexpr = GROUP // parts
    c = tl.arange(0, words)[None, :]
    if KIND == INT4:
        at = group.to(tl.int64) * total + row
        held = tl.load(values + at[:, None] * words + c, mask=inside[:, None], other=0)
        offset = tl.load(zero + at, mask=inside, other=0)[:, None]
        factor = tl.load(scale + at, mask=inside, other=0.0)[:, None]
        first = tl.join(
            unpack(held, offset, factor, 0, KIND, DTYPE, INTERPRETED),
            unpack(held, offset, factor, 1, KIND, DTYPE, INTERPRETED),
        )
        second = tl.join(
            unpack(held, offset, factor, 2, KIND, DTYPE, INTERPRETED),
            unpack(held, offset, factor, 3, KIND, DTYPE, INTERPRETED),
        )
        return tl.reshape(tl.join(first, second), [row.shape[0], GROUP])
    elif KIND == FP8:  # noqa: RET505 (Triton compiles what follows a return)
        held = tl.load(values + row.to(tl.int64)[:, None] * (K // 2) + group * words + c, mask=inside[:, None], other=0)
        both = tl.join(
            unpack(held, None, None, 0, KIND, DTYPE, INTERPRETED), unpack(held, None, None, 1, KIND, DTYPE, INTERPRETED)
        )
        return tl.reshape(both, [row.shape[0], GROUP])
    else:
        k = group * GROUP + c
        return tl.load(values + row.to(tl.int64)[:, None] * K + k, mask=inside[:, None] & (k < K), other=0.0)


@triton.jit
def _columns(group, KIND: tl.constexpr):
    """Inputs that the columns of _decoded() are."""
    i = tl.arange(0, GROUP)
    if KIND == INT4:
        return group * GROUP + (i // 2 % 2 + i % 2 * 2) * (GROUP // 4) + i // 4
    elif KIND == FP8:  # noqa: RET505 (Triton compiles what follows a return)
        return group * GROUP + i % 2 * (GROUP // 2) + i // 2
    else:
        return group * GROUP + i


@triton.jit(do_not_specialize=["room"])
def _input_grad_kernel(
    grad, counts, pairs, values, scale, zero, out, room,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
    GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Program for 128 inputs of an expert and BLOCK_M of its pairs."""
    group = tl.program_id(0)
    expert, begin, own = locate(counts, tl.program_id(1), COUNT, BLOCK_M)
    if expert < COUNT:
        place = begin + tl.arange(0, BLOCK_M)
        live = place < own
        pair = tl.load(pairs + expert.to(tl.int64) * room + place, mask=live, other=0)
        source = grad + (pair // CHOSEN if GATHER else pair).to(tl.int64)[:, None] * N
        dtype: tl.constexpr = grad.dtype.element_ty
        acc = tl.zeros((BLOCK_M, GROUP), tl.float32)
        for start in tl.range(0, N, BLOCK_R, num_stages=STAGES):
            r = start + tl.arange(0, BLOCK_R)
            inside = r < N
            row = expert * N + r
            left = tl.load(source + r[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            if KIND == FP8:
                left = (left.to(tl.float32) * tl.load(scale + row, mask=inside, other=0.0)[None, :]).to(dtype)
            right = _decoded(values, scale, zero, row, inside, COUNT * N, group, K, KIND, dtype, INTERPRETED)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        k = _columns(group, KIND)
        target = out + pair.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(target, acc.to(dtype), mask=live[:, None] & (k < K)[None, :])


def grouped_input_grad(
    grad: Tensor, groups: Groups, weight: Weight, tile: GroupTile, *, gather: bool = False
) -> Tensor:
    """The product of each pair's gradient with its expert's matrix, transposed.

    Args:
        grad: [T, N] with ``gather``, else [T · chosen, N], contiguous.
        groups: without the shared expert.
        weight: [experts · N, K].
        tile: block_k: rows of the matrix of a load.

    Returns:
        [T · chosen, K] in grad's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    routes = groups.routes
    outputs, inputs = weight.shape[0] // routes.count, weight.shape[1]
    pairs = routes.experts.numel()
    if grad.shape != (routes.rows if gather else pairs, outputs) or not grad.is_contiguous():
        raise ValueError(f"grouped_input_grad: {tuple(grad.shape)} does not fit {pairs} pairs of {outputs} outputs")
    out = torch.empty(pairs, inputs, dtype=grad.dtype, device=grad.device)
    _input_grad_kernel[(triton.cdiv(inputs, GROUP.value), groups.tiles(tile.block_m))](
        grad, groups.counts, groups.pairs, *parts_of(weight), out, routes.rows,
        COUNT=routes.count, CHOSEN=routes.chosen, K=inputs, N=outputs, KIND=KINDS[weight_kind(weight)], GATHER=gather,
        BLOCK_M=tile.block_m, BLOCK_R=tile.block_k, STAGES=tile.stages,
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=tile.warps,
    )  # fmt: skip
    return out


@triton.jit
def _activation_kernel(gate_up, grad, weights, weight_grads, WIDTH: tl.constexpr):
    """Program for a pair."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = column < WIDTH
    place = gate_up + pair * 2 * WIDTH + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    sigma = sigmoid(gate)
    active = gate * sigma
    tl.store(weight_grads + pair, tl.sum(given * active * up, axis=0))
    given *= tl.load(weights + pair)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    slope = sigma * (1.0 + gate * (1.0 - sigma))
    tl.store(place, (given * up * slope).to(dtype), mask=inside)
    tl.store(place + WIDTH, (given * active).to(dtype), mask=inside)


def activation_backward(gate_up: Tensor, grad: Tensor, weights: Tensor) -> Tensor:
    """Gradients in gate | up, in place of gate_up, and in the weights of the pairs.

    Args:
        gate_up: [pairs, 2 · size] contiguous.
        grad: [pairs, size] contiguous: the gradient in ``silu(gate) · up`` of a pair whose weight is 1.
        weights: [T, chosen] float32.

    Returns:
        [T, chosen] float32.
    """
    weight_grads = torch.empty_like(weights)
    _activation_kernel[(len(gate_up),)](gate_up, grad, weights, weight_grads, WIDTH=grad.shape[1], num_warps=4)
    return weight_grads
