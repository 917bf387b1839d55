"""The experts that each token passes, and their weights; forward and backward. Reference: `kernels.experts.route`.

A softmax over all experts, divided by the sum over those that are chosen, is the softmax over the chosen ones: the
kernels compute that.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import exponential, sigmoid
from kernels.gpu.experts.lookahead import Lookahead, ask, asking

_LEAST = tl.constexpr(-3.0e38)
"""In place of a score that is not a number: a row that is lost still takes as many different experts as others."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of each token and their weights."""

    experts: Tensor
    """[T, chosen] int32, the likeliest first; with the shared expert among them it is the last, of the number behind
    all others."""
    weights: Tensor
    """[T, chosen] float32."""
    count: int
    """Experts that there are, the shared one included if it is among them."""

    @property
    def chosen(self) -> int:
        return self.experts.shape[1]

    @property
    def rows(self) -> int:
        return self.experts.shape[0]


@triton.jit
def _route_kernel(
    logits,
    experts,
    weights,
    active,
    ahead,
    stride,
    active_stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    ASKING: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for a token; the last ASKING ones ask L2 for weights, while the kernel ahead runs."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    share = row - (tl.num_programs(0) - ASKING)
    if ASKING > 0 and share >= 0:
        ask(ahead, share, ASKING, BULK)
    else:
        _choose(logits, experts, weights, active, row, stride, active_stride, EXPERTS, CHOSEN, SHARED, WIDTH, PDL)


@triton.jit
def _choose(
    logits,
    experts,
    weights,
    active,
    row,
    stride,
    active_stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of a token, and what becomes of its shared expert's activation."""
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    if PDL:
        gdc_wait()
    score = tl.load(logits + row * stride + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    left = tl.where(score == score, score, _LEAST)
    j = tl.arange(0, triton.next_power_of_2(CHOSEN + SHARED))
    chosen = tl.full(j.shape, EXPERTS, tl.int32)
    value = tl.full(j.shape, float("-inf"), tl.float32)
    for turn in tl.static_range(CHOSEN):
        best = tl.max(left, axis=0)
        index = tl.min(tl.where(left == best, e, EXPERTS - 1), axis=0)
        chosen = tl.where(j == turn, index, chosen)
        value = tl.where(j == turn, best, value)
        left = tl.where(e == index, float("-inf"), left)
    share = exponential(value - tl.max(value, axis=0))
    share = tl.where(j < CHOSEN, share, 0.0)
    share = share / tl.sum(share, axis=0)
    if SHARED or active is not None:
        gate = sigmoid(tl.load(logits + row * stride + EXPERTS).to(tl.float32))
        if SHARED:
            share = tl.where(j == CHOSEN, gate, share)
        if active is not None:
            column = tl.arange(0, triton.next_power_of_2(WIDTH))
            place = active + row * active_stride + column
            wide = tl.load(place, mask=column < WIDTH, other=0.0).to(tl.float32) * gate
            tl.store(place, wide.to(active.dtype.element_ty), mask=column < WIDTH)
    taken: tl.constexpr = CHOSEN + SHARED
    tl.store(experts + row * taken + j, chosen, mask=j < taken)
    tl.store(weights + row * taken + j, share, mask=j < taken)


def route(
    logits: Tensor,
    chosen: int,
    *,
    shared: bool = False,
    active: Tensor | None = None,
    lookahead: Lookahead | None = None,
    pdl: bool = False,
) -> Routes:
    """Chooses the experts of each token.

    Args:
        logits: [T, experts + 1] any float dtype: a score for each expert, and the logit of the shared expert's gate.
        chosen: experts a token.
        shared: the shared expert becomes one more of them, its weight the gate.
        active: [T, width], what the shared expert's last linear map reads: multiplied by its gate in place.
        lookahead: weights to ask L2 for meanwhile.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Raises:
        ValueError: more experts are to be chosen than there are.
    """
    rows, count = logits.shape[0], logits.shape[1] - 1
    if not 1 <= chosen <= count or logits.stride(1) != 1:
        raise ValueError(f"route: {chosen} of {count} experts from contiguous rows")
    taken = chosen + shared
    experts = torch.empty(rows, taken, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, taken, dtype=torch.float32, device=logits.device)
    ahead, constants = asking(lookahead)
    if rows:
        _route_kernel[(rows + constants["ASKING"],)](
            logits,
            experts,
            weights,
            active,
            ahead,
            logits.stride(0),
            0 if active is None else active.stride(0),
            EXPERTS=count,
            CHOSEN=chosen,
            SHARED=int(shared),
            WIDTH=1 if active is None else active.shape[1],
            PDL=pdl,
            **constants,
            num_warps=1,
            launch_pdl=pdl,
        )
    return Routes(experts, weights, count + shared)


@triton.jit
def _route_backward_kernel(
    logits, experts, weights, grads, active, active_grad, out, stride,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program for a token."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, triton.next_power_of_2(CHOSEN))
    expert = tl.load(experts + row * CHOSEN + j, mask=j < CHOSEN, other=-1)
    share = tl.load(weights + row * CHOSEN + j, mask=j < CHOSEN, other=0.0)
    grad = tl.load(grads + row * CHOSEN + j, mask=j < CHOSEN, other=0.0)
    grad = share * (grad - tl.sum(share * grad, axis=0))
    e = tl.arange(0, triton.next_power_of_2(EXPERTS + 1))
    scattered = tl.sum(tl.where(e[:, None] == expert[None, :], grad[None, :], 0.0), axis=1)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = column < WIDTH
    gate = sigmoid(tl.load(logits + row * stride + EXPERTS).to(tl.float32))
    wide = tl.load(active + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    place = active_grad + row * WIDTH + column
    wide_grad = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (wide_grad * gate).to(active_grad.dtype.element_ty), mask=inside)
    scattered = tl.where(e == EXPERTS, tl.sum(wide * wide_grad, axis=0) * gate * (1.0 - gate), scattered)
    tl.store(out + row * (EXPERTS + 1) + e, scattered.to(out.dtype.element_ty), mask=e <= EXPERTS)


def route_backward(logits: Tensor, routes: Routes, weight_grads: Tensor, active: Tensor, active_grad: Tensor) -> Tensor:
    """Gradient in the logits; that of the gated activation of the shared expert becomes that of the activation itself.

    Args:
        logits: [T, experts + 1], as route() had them.
        routes: of route(), without the shared expert.
        weight_grads: [T, chosen] float32, in the weights.
        active: [T, width] contiguous: the activation before its gate.
        active_grad: [T, width] contiguous: the gradient behind the gate; changed in place.

    Returns:
        [T, experts + 1] in the logits' dtype.
    """
    out = torch.empty_like(logits)
    _route_backward_kernel[(routes.rows,)](
        logits, routes.experts, routes.weights, weight_grads, active, active_grad, out, logits.stride(0),
        EXPERTS=routes.count, CHOSEN=routes.chosen, WIDTH=active.shape[1], num_warps=4,
    )  # fmt: skip
    return out
