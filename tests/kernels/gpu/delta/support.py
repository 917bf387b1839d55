"""Inputs of a DeltaNet mixer and its exact results: one token after the other in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.segments import Segments

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Mixer:
    """A layer and T rows of its input."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    projected: Tensor
    conv: Tensor
    negative_a: Tensor
    dt_bias: Tensor
    norm: Tensor

    @property
    def conv_dim(self) -> int:
        return self.conv.shape[1]

    def parameters(self) -> tuple[Tensor, Tensor, Tensor, float]:
        return self.negative_a, self.dt_bias, self.norm, EPS


def mixer(
    rows: int,
    device: torch.device | str,
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    kernel: int = 4,
    dtype: torch.dtype = torch.float32,
    alike: float = 0.0,
    slow: float = 0.0,
    seed: int = 0,
) -> Mixer:
    """Random values; ``alike`` in 0..1 is how much all keys of a head share one direction. With ``slow`` 0 hardly
    anything of a state is left 64 tokens later, with 6 much of it after hundreds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys, values = key_heads * key_dim, heads * value_dim
    width = 2 * keys + 2 * values + 2 * heads
    projected = normal(rows, width)
    if alike:
        projected[:, keys : 2 * keys] = alike * 2 * normal(1, keys) + (1 - alike) * projected[:, keys : 2 * keys]
        projected[:, width - 2 * heads : width - heads] += 4 * alike  # β near one
    projected[:, width - heads :] -= slow
    return Mixer(
        key_heads,
        heads,
        key_dim,
        value_dim,
        projected.to(device, dtype),
        normal(kernel, 2 * keys + values).mul(0.5).to(device, dtype),
        (-torch.rand(heads, generator=generator).mul(4).exp()).mul(0.1).to(device),
        normal(heads).to(device),
        (1 + 0.1 * normal(value_dim)).to(device),
    )


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence whose state is wanted behind each of its links."""

    start: int
    slot: int
    lengths: Sequence[int]
    targets: Sequence[int]
    """Slots of those states; the last may be ``slot``."""


CHAINS = (
    [Chain(0, 2, (8, 9, 15, 16), (5, 6, 7, 2))],
    [Chain(3, 2, (63, 1, 65), (5, 6, 2)), Chain(7, 1, (17,), (1,)), Chain(0, 3, (8, 129), (7, 4))],
    [Chain(9, 1, (1,), (1,)), Chain(64, 2, (64, 64), (6, 2)), Chain(0, 3, (127, 2, 1), (4, 5, 3))],
    [Chain(0, 1, (31, 33), (4, 1)), Chain(5, 2, (33, 31, 8), (6, 5, 7))],
)
"""Batches, with ordinary segments beside."""
CHAIN_SLOTS = 9


def chain_segments(chains: Sequence[Chain], device: torch.device | str, *, first_row: int = 0) -> Segments:
    """Segments of a batch, with room for more."""
    rows = [
        (length, chain.start + sum(chain.lengths[:place]), chain.slot, target, 0 if place else len(chain.lengths))
        for chain in chains
        for place, (length, target) in enumerate(zip(chain.lengths, chain.targets, strict=True))
    ]
    lengths, starts, slots, targets, links = zip(*rows, strict=True)
    return Segments.build(
        lengths,
        starts,
        slots,
        [0] * len(rows),
        device,
        first_row=first_row,
        max_segments=len(rows) + 2,
        max_tiles=sum(lengths) // 8,
        out_slots=targets,
        links=links,
    )


def exact_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: [L, channels] after the kernel − 1 rows of ``state``, and the last kernel − 1 inputs."""
    kernel = weight.shape[0]
    buffer = torch.cat((state, x)).double()
    total = torch.stack([buffer[tap : tap + len(x)] * weight[tap].double() for tap in range(kernel)]).sum(0)
    return F.silu(total), torch.cat((state, x))[len(x) :]


def exact_delta(m: Mixer, mixed: Tensor, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: gates, L2 norms, S ← exp(g) S + k ⊗ β (v − exp(g) Sᵀk), o = Sᵀq, gated norm, in float64.

    Args:
        mixed: [L, conv_dim], projected: [L, width], state: [heads, key_dim, value_dim] before.

    Returns:
        [L, value_size] and the state after, float64.
    """
    keys, values, heads = m.key_heads * m.key_dim, m.heads * m.value_dim, m.heads
    x, rest = mixed.double(), projected.double()[:, m.conv_dim :]
    ratio = heads // m.key_heads

    def unit(y: Tensor) -> Tensor:
        y = y.reshape(len(x), m.key_heads, m.key_dim)
        return (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(ratio, 1)

    q, k = unit(x[:, :keys]) * m.key_dim**-0.5, unit(x[:, keys : 2 * keys])
    v = x[:, 2 * keys :].view(-1, heads, m.value_dim)
    z = rest[:, :values].view(-1, heads, m.value_dim)
    beta = torch.sigmoid(rest[:, values : values + heads])
    g = m.negative_a.double() * F.softplus(rest[:, values + heads :] + m.dt_bias.double())
    state = state.double()
    outputs = []
    for t in range(len(x)):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - (state * k[t][:, :, None]).sum(1))
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append((state * q[t][:, :, None]).sum(1))
    o = torch.stack(outputs)
    y = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * m.norm.double() * F.silu(z)
    return y.reshape(len(x), values), state
