"""Log-probabilities of given tokens without the logits of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TILE = 256
"""Rows whose logits exist at once."""


class TokenScores(NamedTuple):
    """Log-probability of each row's target."""

    logprobs: Tensor
    """[N] float32: ``log softmax(head · hidden / temperature)[target]``, differentiable in the hidden states."""
    hits: Tensor
    """[N] bool: no other token is likelier."""


def token_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, *, give_way: Callable[[], None] = lambda: None
) -> TokenScores:
    """Scores the target of each row; differentiable in ``hidden``, not in ``head``.

    Tiles of rows; the backward computes the logits of each again (as Cut Your Losses, arXiv 2411.09009). With p the
    softmax, the gradient of row i is ``g_i (head[target] − pᵀ head) / temperature``.

    Args:
        hidden: [N, H].
        head: [vocab, H], same dtype.
        targets: [N] int64.
        temperature: above 0.
        give_way: called between two tiles.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    logprobs, hits = _TokenScores.apply(hidden, head, targets, temperature, give_way)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, hits)


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[N] float32: the log-probabilities of token_scores() alone."""
    return token_scores(hidden, head, targets, temperature).logprobs


def _tile_logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """The sampler's own expression, so that both round alike."""
    return F.linear(hidden, head).float() / temperature


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, give_way: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        normalizers = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        chosen = torch.empty_like(normalizers)
        hits = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        for begin in range(0, hidden.shape[0], TILE):
            give_way()
            tile = slice(begin, begin + TILE)
            logits = _tile_logits(hidden[tile], head, temperature)
            normalizers[tile] = torch.logsumexp(logits, dim=-1)
            chosen[tile] = logits.gather(1, targets[tile, None]).squeeze(1)
            hits[tile] = chosen[tile] >= logits.amax(-1)
        ctx.save_for_backward(hidden, head, targets, normalizers)
        ctx.temperature, ctx.give_way = temperature, give_way
        ctx.mark_non_differentiable(hits)
        return chosen - normalizers, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, head, targets, normalizers = ctx.saved_tensors
        scaled = grads[0].float() / ctx.temperature
        out = torch.empty_like(hidden)
        for begin in range(0, hidden.shape[0], TILE):
            ctx.give_way()
            tile = slice(begin, begin + TILE)
            logits = _tile_logits(hidden[tile], head, ctx.temperature)
            weights = logits.sub_(normalizers[tile, None]).exp_().mul_(-scaled[tile, None])
            weights.scatter_add_(1, targets[tile, None], scaled[tile, None])
            out[tile] = weights.to(hidden.dtype) @ head
        return out, None, None, None, None
