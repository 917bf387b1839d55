"""The differentiable forwards of training in float64, straight from their formulas, for autograd to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.train.documents import Documents
from kernels.rope import Rotation


def split(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, list(lengths))


TREE: list[tuple[int, int | None]] = [
    (65, None), (1, 0), (2, 1), (33, 2), (1, 2), (70, 0), (1, None), (1, 6), (3, 7), (4, 7)
]  # fmt: skip
"""Lengths of documents and which they go on from: behind one, two and three others, several behind one, a tile and a
token and less than a convolution looks back at."""


def along(function: Callable[[Tensor], Tensor], tree: Sequence[tuple[int, int | None]]) -> Tensor:
    """What ``function`` makes of each document's rows behind those of all that it goes on from, without theirs.

    Args:
        function: rows [n] int64 of one sequence to [n, …].
    """
    rows: list[Tensor] = []
    outputs, begin = [], 0
    for length, parent in tree:
        own = torch.arange(begin, begin + length)
        rows.append(own if parent is None else torch.cat((rows[parent], own)))
        outputs.append(function(rows[-1])[-length:])
        begin += length
    return torch.cat(outputs)


def branching(tree: Sequence[tuple[int, int | None]], device: torch.device, past: int = 3) -> Documents:
    lengths, parents = zip(*tree, strict=True)
    return Documents.branching(lengths, parents, device, past=past)


def rms_norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def conv64(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """[T, channels]; nothing comes before a document."""
    kernel = weight.shape[0]
    parts = []
    for part in split(x, lengths):
        padded = F.pad(part, (0, 0, kernel - 1, 0))
        parts.append(sum(padded[tap : tap + len(part)] * weight[tap].double() for tap in range(kernel)))
    return F.silu(torch.cat(parts))


def delta64(
    mixed: Tensor, gates: Tensor, negative_a: Tensor, dt_bias: Tensor, shape: DeltaShape, lengths: Sequence[int]
) -> Tensor:
    """Token by token; gates [T, 2 · value_heads] are b | a. Returns [T, value_size]."""
    keys, heads = shape.key_heads * shape.key_dim, shape.value_heads
    ratio = heads // shape.key_heads

    def unit(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (shape.key_heads, shape.key_dim))
        return (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(ratio, dim=1)

    outputs = []
    for rows, ba in zip(split(mixed, lengths), split(gates, lengths), strict=True):
        q = unit(rows[:, :keys]) * shape.key_dim**-0.5
        k = unit(rows[:, keys : 2 * keys])
        v = rows[:, 2 * keys :].unflatten(-1, (heads, shape.value_dim))
        beta = torch.sigmoid(ba[:, :heads])
        decay = (negative_a.double() * F.softplus(ba[:, heads:] + dt_bias.double())).exp()
        state = torch.zeros(heads, shape.key_dim, shape.value_dim, dtype=torch.float64, device=mixed.device)
        for t in range(len(rows)):
            state = state * decay[t, :, None, None]
            read = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - read))
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]).flatten())
    return torch.stack(outputs)


def rope64(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """[T, heads, head_dim]."""
    half = rotation.half
    # The kernels' angles are rounded to float32, as the reference's.
    angles = (positions.float()[:, None] * rotation.frequencies[None, :]).double()[:, None, :]
    cosine, sine = rotation.scale * angles.cos(), rotation.scale * angles.sin()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), dim=-1)


def attention64(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d] to [T, heads, d]; causal within each document."""
    ratio = q.shape[1] // k.shape[1]
    outputs = []
    for a, b, c in zip(split(q, lengths), split(k, lengths), split(v, lengths), strict=True):
        b, c = b.repeat_interleave(ratio, dim=1), c.repeat_interleave(ratio, dim=1)
        scores = torch.einsum("thd,shd->hts", a, b) * q.shape[2] ** -0.5
        mask = torch.ones(len(a), len(a), dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
        outputs.append(torch.einsum("hts,shd->thd", weights, c))
    return torch.cat(outputs)


def relative(ours: Tensor, exact: Tensor) -> float:
    """|ours − exact| / |exact| of the whole tensor, which counts as at least 0.1 an element: inputs and gradients here
    are of size 1, and some results are exactly 0."""
    return float((ours.double() - exact).norm() / max(float(exact.norm()), 0.1 * exact.numel() ** 0.5))
