"""Writes to the states of the gated delta rule that wait, so that a decode step reads a state without writing it back.

A state is 64 KB a head, what one token adds to it a key and a value: k ⊗ δ, behind a factor exp(g) on all that was
there. Kept as such for up to ``room`` tokens, a state S and its waiting writes i mean

    S' = exp(Σ g) S + Σ_i exp(Σ_{p>i} g_p) k_i ⊗ δ_i

whose products with a vector take one reading of S and two small products, and every ``room`` steps S' is written back.
The same as the recurrence up to rounding: the accumulated form of a product of rank-one changes, as in the WY
representation (Yang et al., arXiv 2406.06484, §3), for one sequence over time instead of one chunk.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import exponential_for

MOST = 8
"""Most waiting writes of a head: the first of a span is then at most 7, and leaves the sign of its byte alone."""


class Waiting(NamedTuple):
    """WaitingWrites as kernels take them."""

    spans: Any
    keys: Any
    deltas: Any
    decays: Any


@dataclass(frozen=True, slots=True)
class WaitingWrites:
    """Writes that wait beside a pool of states [..., num_slots, heads, key_dim, value_dim]; zeros: nothing waits.

    Raises:
        ValueError: more or fewer writes than 1 to 8 a head.
    """

    spans: Tensor
    """[..., num_slots, heads, value_dim] int8, 16 · first + end: writes first to end - 1 wait. One a value dimension,
    all of a head the same, so that programs which share a head by value dimensions each have their own."""
    keys: Tensor
    """[..., num_slots, heads, room, key_dim] in the dtype of the mixer's inputs, not normalised: δ has the factor."""
    deltas: Tensor
    """[..., num_slots, heads, room, value_dim] float32."""
    decays: Tensor
    """[..., num_slots, heads, room] float32, g."""

    def __post_init__(self) -> None:
        if not 1 <= self.room <= MOST:
            raise ValueError(f"1 to {MOST} writes of a head can wait, not {self.room}")

    @classmethod
    def allocate(
        cls,
        *leading: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        room: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WaitingWrites:
        """Buffers for states [*leading, heads, key_dim, value_dim]."""
        places = (*leading, heads)
        return cls(
            spans=torch.zeros(*places, value_dim, dtype=torch.int8, device=device),
            keys=torch.zeros(*places, room, key_dim, dtype=dtype, device=device),
            deltas=torch.zeros(*places, room, value_dim, dtype=torch.float32, device=device),
            decays=torch.zeros(*places, room, dtype=torch.float32, device=device),
        )

    @property
    def room(self) -> int:
        """Writes of a head that can wait."""
        return self.decays.shape[-1]

    def pools(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def clear(self) -> None:
        """Nothing waits, as behind a prompt (see none_waits)."""
        for pool in self.pools():
            pool.zero_()
        phase = torch.arange(self.spans.shape[-2], device=self.spans.device) % self.room
        self.spans.add_((17 * phase).to(torch.int8)[:, None])

    def __getitem__(self, layer: int) -> WaitingWrites:
        """Writes that wait beside one layer's states."""
        return WaitingWrites(*(pool[layer] for pool in self.pools()))

    def arguments(self, state: Tensor) -> Waiting:
        """Arguments for a kernel that works on these states.

        Raises:
            ValueError: they belong to states of another shape, or are not contiguous.
        """
        slots, heads, key_dim, value_dim = state.shape
        shapes = ((slots, heads, value_dim), (slots, heads, self.room, key_dim), (slots, heads, self.room, value_dim))
        if tuple(tuple(pool.shape) for pool in self.pools()[:3]) != shapes:
            raise ValueError(f"waiting writes {tuple(self.deltas.shape)} do not go with states {tuple(state.shape)}")
        if not all(pool.is_contiguous() for pool in self.pools()):
            raise ValueError("waiting writes must be contiguous")
        return Waiting(*self.pools())


NONE = Waiting(None, None, None, None)
"""Arguments for states that are always written back."""


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def span_of(waiting, place, first_value, VALUE_DIM: tl.constexpr):
    """First and end of what waits for the value dimensions from ``first_value`` on; ``place``: slot · heads + head."""
    span = tl.load(waiting.spans + place * VALUE_DIM + first_value).to(tl.int32)
    return span >> 4, span & 15


@triton.jit
def set_span(waiting, place, j, first, end, VALUE_DIM: tl.constexpr):
    span = tl.zeros_like(j) + (16 * first + end)
    tl.store(waiting.spans + place * VALUE_DIM + j, span.to(tl.int8), mask=j < VALUE_DIM)


@triton.jit
def products_of_writes(
    waiting,
    place,
    first,
    end,
    j,
    k,
    q,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Decay of a state since it was written, and what its products with a key and a query, [j] each, lack."""
    i = tl.arange(0, BLOCK_K)[None, :]
    p = tl.arange(0, BLOCK_W)
    waits = (p >= first) & (p < end)
    at = place * ROOM + p
    keys = tl.load(waiting.keys + at[:, None] * KEY_DIM + i, mask=waits[:, None] & (i < KEY_DIM), other=0.0)
    held = waits[:, None] & (j[None, :] < VALUE_DIM)
    deltas = tl.load(waiting.deltas + at[:, None] * VALUE_DIM + j[None, :], mask=held, other=0.0)
    decays = tl.load(waiting.decays + at, mask=waits, other=0.0)
    fade = exponential_for(tl.sum(tl.where(p[:, None] > p[None, :], decays[:, None], 0.0), axis=0), keys.dtype)
    keys = keys.to(tl.float32)
    along, across = tl.reduce((keys * k[None, :], keys * q[None, :]), 1, add_pairs)
    along, across = fade * along, fade * across
    read, o = tl.reduce((along[:, None] * deltas, across[:, None] * deltas), 0, add_pairs)
    return exponential_for(tl.sum(decays), waiting.keys.dtype.element_ty), read, o


@triton.jit
def put_write(
    waiting,
    place,
    at,
    token,
    delta,
    j,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Puts a write at one of the places of those that wait; it does once set_span() says so."""
    i = tl.arange(0, BLOCK_K)
    here = place * ROOM + at
    tl.store(waiting.keys + here * KEY_DIM + i, token.k.to(waiting.keys.dtype.element_ty), mask=i < KEY_DIM)
    tl.store(waiting.deltas + here * VALUE_DIM + j, delta, mask=j < VALUE_DIM)
    tl.store(waiting.decays + here, token.log_decay)


@triton.jit
def settled(s, waiting, place, first, end, i, j, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROOM: tl.constexpr):
    """[i, j] of a state with what waits for it, one write after the other."""
    for write in tl.range(first, end):
        at = place * ROOM + write
        k = tl.load(waiting.keys + at * KEY_DIM + i, mask=i < KEY_DIM, other=0.0).to(tl.float32)
        delta = tl.load(waiting.deltas + at * VALUE_DIM + j, mask=j < VALUE_DIM, other=0.0)
        decay = exponential_for(tl.load(waiting.decays + at), waiting.keys.dtype.element_ty)
        s = decay * s + k[:, None] * delta[None, :]
    return s


@triton.jit
def state_now(
    state,
    waiting,
    place,
    cached,
    held,
    i,
    j,
    first_value,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROOM: tl.constexpr,
):
    """[i, j] of a state in float32, with what waits for it; zeros if it is not ``cached``."""
    places = state + (place * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    s = tl.load(places, mask=held & cached, other=0.0).to(tl.float32)
    if ROOM > 0:
        write, writes_end = span_of(waiting, place, first_value, VALUE_DIM)
        writes_end = tl.where(cached, writes_end, write)
        s = settled(s, waiting, place, write, writes_end, i, j, KEY_DIM, VALUE_DIM, ROOM)
    return s


@triton.jit
def none_waits(waiting, place, head, j, VALUE_DIM: tl.constexpr, ROOM: tl.constexpr):
    """Empties the waiting writes of a state that was written: heads begin at different places, so that later a few of
    them are written back in every step instead of all in one."""
    set_span(waiting, place, j, head % ROOM, head % ROOM, VALUE_DIM)
