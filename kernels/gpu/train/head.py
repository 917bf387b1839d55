"""Log-probabilities of given tokens under the head, and their gradient in the hidden states, a tile of rows at a time.

The logits of a tile exist once, in the model's dtype; where a gradient is wanted, their derivative takes their place
and the second product follows at once: with p the softmax of ``z / temperature``, the derivative of row i in its hidden
state is ``(1[target] − p)ᵀ head / temperature``, which the backward only scales (as Liger's fused linear losses do,
arXiv 2410.10989). So two products a row in all, and nothing of the vocabulary's width is kept. Reference:
`kernels.token_logprobs`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import exponential_for
from kernels.token_logprobs import TokenScores

_TILE = 384
"""Rows whose logits exist at once: 191 MB of bfloat16 at 248,320 tokens, and 0.7 ms a product on an H200."""
_BLOCK = 4096


@triton.jit
def _rows_kernel(
    logits, targets, logprobs, hits, width, stride, inverse_temperature, SLOPE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        z = tl.load(base + first + lane, mask=first + lane < width, other=float("-inf")).to(tl.float32)
        z *= inverse_temperature
        new = tl.maximum(highest, z)
        # A lane that has seen nothing yet: −∞ − −∞ is no number.
        safe = tl.where(new == float("-inf"), 0.0, new)
        scaled = exponential_for(highest - safe, logits.dtype.element_ty)
        total = total * scaled + exponential_for(z - safe, logits.dtype.element_ty)
        highest = new
    most = tl.max(highest, axis=0)
    total = tl.sum(total * exponential_for(highest - most, logits.dtype.element_ty), axis=0)
    normalizer = most + tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.load(base + target).to(tl.float32) * inverse_temperature
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(hits + row, chosen >= most)
    if SLOPE:
        tl.debug_barrier()  # the chosen logit is read before it is overwritten
        for first in range(0, width, BLOCK):
            inside = first + lane < width
            z = tl.load(base + first + lane, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
            slope = tl.where(first + lane == target, 1.0, 0.0) - exponential_for(
                z - normalizer, logits.dtype.element_ty
            )
            tl.store(base + first + lane, slope.to(logits.dtype.element_ty), mask=inside)


def score_rows(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, hits: Tensor, *, slope: bool
) -> None:
    """``log softmax(logits / temperature)[target]`` of each row, and whether no other logit is higher.

    Args:
        logits: [N, vocab], rows contiguous; with ``slope`` overwritten by 1 at the target − softmax, the derivative in
            the tempered logits.
        targets: [N] int64.
        logprobs, hits: [N] float32 and bool, where the results go.
    """
    rows, width = logits.shape
    _rows_kernel[(rows,)](
        logits,
        targets,
        logprobs,
        hits,
        width,
        logits.stride(0),
        1.0 / temperature,
        SLOPE=slope,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=8,
    )


def token_scores(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    tile: int = _TILE,
    give_way: Callable[[], None] = lambda: None,
) -> TokenScores:
    """Scores the target of each row; differentiable in ``hidden``, not in ``head``.

    Args:
        hidden: [N, H].
        head: [vocab, H], same dtype.
        targets: [N] int64.
        temperature: above 0.
        tile: rows whose logits exist at once.
        give_way: called before each product.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    wanted = hidden.requires_grad and torch.is_grad_enabled()
    logprobs, hits = _TokenScores.apply(hidden, head, targets, temperature, tile, wanted, give_way)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, hits)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        tile: int,
        wanted: bool,
        give_way: Callable[[], None],
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        hits = torch.empty(count, dtype=torch.bool, device=hidden.device)
        slope = torch.empty_like(hidden) if wanted else None
        for begin in range(0, count, tile):
            give_way()
            rows = slice(begin, begin + tile)
            logits = F.linear(hidden[rows], head)
            score_rows(logits, targets[rows], temperature, logprobs[rows], hits[rows], slope=wanted)
            if slope is not None:
                give_way()
                torch.mm(logits, head, out=slope[rows])
            del logits
        if slope is not None:
            ctx.save_for_backward(slope)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(hits)
        return logprobs, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        scale = (grads[0] / ctx.temperature).unsqueeze(1)
        # Multiplied in float32, and without a tensor of it.
        return torch.mul(slope, scale, out=torch.empty_like(slope)), None, None, None, None, None, None
