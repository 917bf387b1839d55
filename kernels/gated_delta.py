"""The gated delta rule: one-token recurrence, and the chunked form over packed segments. References in plain torch.

Per head with state S [key_dim, value_dim], decay g ≤ 0 and write strength β (Yang et al., Gated Delta Networks, arXiv
2412.06464):

    S ← exp(g) S;  S ← S + k ⊗ β (v − Sᵀk);  o = Sᵀq

A query/key head serves value_heads / key_heads consecutive value heads. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CHUNK = 32
"""Tokens of a chunk: at 64 the triangular system of strongly alike keys costs ten times the rounding error, and the
time is the same."""


def recurrent_gated_delta(queries_keys: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One step of the gated delta rule for n sequences; ``state`` is updated in place.

    With kv = Sᵀk, o = exp(g) Sᵀq + (k·q) δ, where δ = β (v − exp(g) kv): both products read S once.

    Args:
        queries_keys: [n, 2, key_heads, key_dim] float32, queries first; normalised and scaled.
        v: [n, value_heads, value_dim].
        decay: [n, value_heads] float32, exp(g).
        beta: [n, value_heads] float32.
        state: [n, value_heads, key_dim, value_dim] float32, contiguous.

    Returns:
        [n, value_heads, value_dim] float32.
    """
    n, heads, key_dim, value_dim = state.shape
    ratio = heads // queries_keys.shape[2]
    pairs = queries_keys.transpose(1, 2)
    if ratio > 1:
        pairs = pairs.unsqueeze(2).expand(-1, -1, ratio, -1, -1).reshape(n, heads, 2, key_dim)
    flat = state.view(n * heads, key_dim, value_dim)
    pairs = pairs.reshape(n * heads, 2, key_dim)
    flat.mul_(decay.view(-1, 1, 1))
    reads = torch.bmm(pairs, flat)
    delta = (v.reshape(-1, value_dim).float() - reads[:, 1]).mul_(beta.view(-1, 1)).unsqueeze(1)
    queries, keys = pairs.unbind(1)
    flat.baddbmm_(keys.unsqueeze(2), delta)
    overlap = (queries * keys).sum(-1, keepdim=True)
    return torch.addcmul(reads[:, 0], overlap, delta.squeeze(1)).view(n, heads, value_dim)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Packed segments cut into chunks of at most ``size`` tokens, each segment's last chunk padded.

    Chunks are ordered by their number within the segment, then by segment from the longest to the shortest: step j of
    the scan over chunks works on one contiguous run of ``active[j]`` chunks, those of the first active[j] segments.
    """

    size: int
    gather: Tensor
    """[chunks · size] int64: token of each place; padding points at its chunk's first token, so that what is not finite
    in one segment reaches no other, backwards either."""
    padding: Tensor | None
    """[chunks, 1, size] bool, True at padding; None: there is none."""
    scatter: Tensor
    """[T] int64: place of each token."""
    order: Tensor
    """[S] int64: segments from the longest to the shortest."""
    inverse: Tensor
    """[S] int64: rank of each segment in that order."""
    active: tuple[int, ...]

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device, *, limit: int = CHUNK) -> ChunkLayout:
        """Layout of segments of these lengths, each at least 1, in order and without gaps."""
        longest = max(lengths)
        size = min(limit, 1 << (longest - 1).bit_length())
        sizes = torch.tensor(lengths, dtype=torch.int64)
        order = torch.argsort(sizes, descending=True, stable=True)
        inverse = torch.argsort(order)
        counts = (sizes + size - 1) // size
        steps = -(-longest // size)
        active = (counts[None, :] > torch.arange(steps)[:, None]).sum(1)
        first = torch.cumsum(active, 0) - active
        segment = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        within = torch.arange(int(sizes.sum())) - (torch.cumsum(sizes, 0) - sizes)[segment]
        scatter = (first[within // size] + inverse[segment]) * size + within % size
        places = int(active.sum()) * size
        gather = torch.zeros(places, dtype=torch.int64)
        gather[scatter] = torch.arange(len(scatter))
        padding = None
        if places > len(scatter):
            padding = torch.ones(places, dtype=torch.bool)
            padding[scatter] = False
            firsts = gather.view(-1, size)[:, :1].expand(-1, size).flatten()
            gather = torch.where(padding, firsts, gather)
            padding = padding.view(-1, 1, size).to(device)
        return cls(
            size=size,
            gather=gather.to(device),
            padding=padding,
            scatter=scatter.to(device),
            order=order.to(device),
            inverse=inverse.to(device),
            active=tuple(active.tolist()),
        )


def chunk_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: ChunkLayout, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence over packed segments in chunks, by the UT transform (arXiv 2406.06484, §3; gated in 2412.06464,
    §3.3). Equal to the one-token form up to rounding, however a sequence is cut. Differentiable.

    Args:
        q, k: [T, key_heads, key_dim] float32, normalised and scaled.
        v: [T, value_heads, value_dim].
        g: [T, value_heads] float32, log decay ≤ 0.
        beta: [T, value_heads] float32.
        state: [S, value_heads, key_dim, value_dim] float32 before each segment; None: zeros.

    Returns:
        [T, value_heads, value_dim] float32 and the state after each segment.
    """
    heads, value_dim = v.shape[1:]
    ratio = heads // k.shape[1]
    segments = layout.order.shape[0]

    def chunked(x: Tensor) -> Tensor:
        """[T, heads, ...] to [chunks, heads, size, ...]."""
        return x.float().index_select(0, layout.gather).view(-1, layout.size, *x.shape[1:]).transpose(1, 2)

    def spread(x: Tensor) -> Tensor:
        """Copies of each key head's matrix for its value heads."""
        return x.repeat_interleave(ratio, dim=1) if ratio > 1 else x

    q, k, v, g, beta = chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta)
    if layout.padding is not None:
        # β = 0 writes nothing and g = 0 forgets nothing, so padding leaves the state alone.
        g, beta = g.masked_fill(layout.padding, 0.0), beta.masked_fill(layout.padding, 0.0)
    total = g.cumsum(-1)
    upper = torch.ones(layout.size, layout.size, dtype=torch.bool, device=v.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()
    weight = beta.unsqueeze(-1)
    grown = total.exp().unsqueeze(-1)
    keys_t = k.transpose(-1, -2)
    system = spread(k @ keys_t) * between * weight
    scores = spread(q @ keys_t) * between
    keys = spread(k)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * weight, keys * (weight * grown)), dim=-1), upper=False, unitriangular=True
    )
    written, read_keys = solved[..., :value_dim], solved[..., value_dim:]
    reads = torch.cat((spread(q) * grown, read_keys), dim=-2)
    last = total[..., -1:]
    late_keys = (keys * (last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    fade = last.exp().unsqueeze(-1)

    if state is None:
        current = v.new_zeros(segments, heads, k.shape[-1], value_dim)
    else:
        current = state if segments == 1 else state.index_select(0, layout.order)
    finished: list[Tensor] = []
    outputs: list[Tensor] = []
    start = 0
    for count in layout.active:
        if count < current.shape[0]:
            finished.append(current[count:])
            current = current[:count]
        here = slice(start, start + count)
        past = reads[here] @ current
        fresh = written[here] - past[..., layout.size :, :]
        outputs.append(past[..., : layout.size, :] + scores[here] @ fresh)
        current = current * fade[here] + late_keys[here] @ fresh
        start += count
    out = torch.cat(outputs).transpose(1, 2).reshape(-1, heads, value_dim).index_select(0, layout.scatter)
    if segments == 1:
        return out, current
    return out, torch.cat([current, *reversed(finished)]).index_select(0, layout.inverse)


def gates(a: Tensor, b: Tensor, negative_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay ``g = −exp(A_log) · softplus(a + dt_bias)`` and write strength ``β = sigmoid(b)``.

    Args:
        a, b: [T, value_heads], any float dtype.
        negative_a: [value_heads] float32, −exp(A_log).
        dt_bias: [value_heads] float32.

    Returns:
        g and β, each [T, value_heads] float32.
    """
    return negative_a * F.softplus(a.float() + dt_bias), torch.sigmoid(b.float())
