"""Cases of benchmarks.kernels.all: DeltaNet and attention, decode and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kernels.timing import Case, Tensors, Work
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.segments import Segments

if TYPE_CHECKING:
    from kernels.gpu.delta.waiting_writes import WaitingWrites


KEY_HEADS, VALUE_HEADS, HEAD = 16, 32, 128
CONV_DIM, VALUE_SIZE, KERNEL = 8192, 4096, 4
WIDTH = CONV_DIM + VALUE_SIZE + 2 * VALUE_HEADS
HEADS, KV_HEADS, DIM, BLOCK = 16, 4, 256, 16
EPS = 1e-6
_CHECKED = 128
"""Tokens of a prefill that are compared: the first ones of the first segment depend on nothing behind them."""


class _Mixer:
    """The weights of a DeltaNet mixer and T rows of its projections."""

    def __init__(self, t: Tensors, rows: int) -> None:
        self.projected = t.normal(rows, WIDTH)
        self.mixed = F.silu(t.normal(rows, CONV_DIM))
        self.conv = t.normal(KERNEL, CONV_DIM, scale=0.5)
        self.negative_a = -t.normal(VALUE_HEADS, dtype=torch.float32).exp().mul(0.1)
        self.dt_bias = t.normal(VALUE_HEADS, dtype=torch.float32)
        self.norm = 1 + t.normal(HEAD, scale=0.1, dtype=torch.float32)

    def parameters(self) -> tuple[Tensor, Tensor, Tensor, float]:
        return self.negative_a, self.dt_bias, self.norm, EPS


def exact_delta(m: _Mixer, rows: slice, state: Tensor) -> Tensor:
    """One sequence token by token in float64: S ← exp(g) S + k ⊗ β (v - exp(g) Sᵀk), o = Sᵀq, gated norm. [L, value].

    Args:
        state: [value_heads, key_dim, value_dim] before the first token.
    """
    x, rest = m.mixed[rows].double(), m.projected[rows, CONV_DIM:].double()
    ratio = VALUE_HEADS // KEY_HEADS

    def unit(y: Tensor) -> Tensor:
        y = y.reshape(-1, KEY_HEADS, HEAD)
        return (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(ratio, 1)

    q, k = unit(x[:, :2048]) * HEAD**-0.5, unit(x[:, 2048:4096])
    v, z = x[:, 4096:].view(-1, VALUE_HEADS, HEAD), rest[:, :VALUE_SIZE].view(-1, VALUE_HEADS, HEAD)
    beta = torch.sigmoid(rest[:, VALUE_SIZE : VALUE_SIZE + VALUE_HEADS])
    g = m.negative_a.double() * F.softplus(rest[:, VALUE_SIZE + VALUE_HEADS :] + m.dt_bias.double())
    s, outputs = state.double(), []
    for t in range(len(x)):
        s = s * g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - (s * k[t][:, :, None]).sum(1))
        s = s + k[t][:, :, None] * delta[:, None, :]
        outputs.append((s * q[t][:, :, None]).sum(1))
    o = torch.stack(outputs)
    return (o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * m.norm.double() * F.silu(z)).flatten(1)


def _states(
    t: Tensors, m: _Mixer, sequences: int, dtype: torch.dtype, room: int
) -> tuple[list[Tensor], list[WaitingWrites | None]]:
    """States of sequences in slots from 1 on, as many copies as push each other out of the caches, and what waits
    beside them; room 0: nothing does."""
    from kernels.gpu.delta.waiting_writes import WaitingWrites

    shape = (sequences + 1, VALUE_HEADS, HEAD, HEAD)
    copies = t.copies(sequences * VALUE_HEADS * HEAD * HEAD * dtype.itemsize)
    states = [t.normal(*shape, scale=0.1, dtype=dtype) for _ in range(copies)]
    waiting: list[WaitingWrites | None] = [None] * copies
    for index in range(copies if room else 0):
        waiting[index] = writes = WaitingWrites.allocate(
            sequences + 1,
            heads=VALUE_HEADS,
            key_dim=HEAD,
            value_dim=HEAD,
            room=room,
            dtype=m.mixed.dtype,
            device=t.device,
        )
        writes.clear()
    return states, waiting


def delta_step(rows: int, dtype: torch.dtype, room: int = 0) -> Case:
    """``room``: of writes that wait; 0: states are written back."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.delta.step import gated_delta_step

        m = _Mixer(t, rows)
        nbytes = rows * VALUE_HEADS * HEAD * HEAD * dtype.itemsize
        states, waiting = _states(t, m, rows, dtype, room)
        slots, before = t.ints(range(1, rows + 1)), states[0][1 : min(rows, 2) + 1].clone()
        return Work(
            [
                partial(
                    gated_delta_step, m.mixed, m.projected, *m.parameters(), state, slots, waiting=writes, late=True
                )
                for state, writes in zip(states, waiting, strict=True)
            ],
            round((1 + 1 / (room or 1)) * nbytes) + 2 * rows * (WIDTH + VALUE_SIZE),
            8 * rows * VALUE_HEADS * HEAD * HEAD,
            lambda result: (
                result[: len(before)],
                torch.cat([exact_delta(m, slice(row, row + 1), before[row]) for row in range(len(before))]),
            ),
        )

    waits = f" {room} writes wait" if room else ""
    return Case("gated_delta_step", f"rows={rows} state={str(dtype).removeprefix('torch.')}{waits}", make)


def delta_verify(sequences: int, group: int, warps: int) -> Case:
    """Tokens of each sequence with draft tokens, every other step with room for its writes; ``warps`` of a program."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.delta.verify import gated_delta_verify

        rows = sequences * group
        m = _Mixer(t, rows)
        nbytes = sequences * VALUE_HEADS * HEAD * HEAD * 4
        states, waiting = _states(t, m, sequences, torch.float32, room=8)
        slots = t.ints([slot for slot in range(1, sequences + 1) for _ in range(group)])
        before = states[0][1].double()
        return Work(
            [
                partial(
                    gated_delta_verify,
                    m.mixed,
                    m.projected,
                    *m.parameters(),
                    state,
                    slots,
                    late,
                    group,
                    num_warps=warps,
                )
                for state, late in zip(states, waiting, strict=True)
                if late is not None
            ],
            round(1.5 * nbytes) + 2 * rows * (WIDTH + VALUE_SIZE),
            8 * rows * VALUE_HEADS * HEAD * HEAD,
            lambda result: (result[:group], exact_delta(m, slice(0, group), before)),
        )

    return Case("gated_delta_verify", f"{sequences}x{group} warps={warps}", make)


def conv_step(rows: int) -> Case:
    def make(t: Tensors) -> Work:
        from kernels.gpu.delta.conv1d import conv_decode

        m, slots = _Mixer(t, rows), t.ints(range(1, rows + 1))
        states = [t.normal(rows + 1, KERNEL - 1, CONV_DIM) for _ in range(t.copies(rows * 3 * CONV_DIM * 2))]
        before = states[0][1:].double()
        return Work(
            [partial(conv_decode, m.projected, m.conv, state, slots) for state in states],
            2 * rows * CONV_DIM * (2 + 2 * (KERNEL - 1)) + 2 * KERNEL * CONV_DIM,
            0,
            lambda result: (
                result,
                F.silu((torch.cat((before, m.projected[:, None, :CONV_DIM].double()), 1) * m.conv.double()).sum(1)),
            ),
        )

    return Case("conv_decode", f"rows={rows}", make)


def _segments(t: Tensors, lengths: Sequence[int], starts: Sequence[int]) -> Segments:
    return Segments.build(lengths, starts, range(1, len(lengths) + 1), [0] * len(lengths), t.device)


def conv_segments(lengths: Sequence[int]) -> Case:
    def make(t: Tensors) -> Work:
        from kernels.gpu.delta.conv1d import conv_prefill

        rows = sum(lengths)
        m, segments = _Mixer(t, rows), _segments(t, lengths, [0] * len(lengths))
        state = t.zeros(len(lengths) + 1, KERNEL - 1, CONV_DIM)
        few = min(lengths[0], _CHECKED)

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            x = F.pad(m.projected[:few, :CONV_DIM].double(), (0, 0, KERNEL - 1, 0))
            exact = torch.stack([x[tap : tap + few] * m.conv[tap].double() for tap in range(KERNEL)]).sum(0)
            return result[:few], F.silu(exact)

        return Work([partial(conv_prefill, m.projected, m.conv, state, segments)], 4 * rows * CONV_DIM, 0, check)

    return Case("conv_prefill", f"{len(lengths)}x{lengths[0]}", make)


def delta_segments(lengths: Sequence[int], config: str = "") -> Case:
    """``config``: FEW or MANY of kernels.gpu.delta.chunk_configs; empty: its own choice."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.delta import chunk_configs
        from kernels.gpu.delta.chunk import gated_delta_prefill

        rows = sum(lengths)
        m, segments = _Mixer(t, rows), _segments(t, lengths, [0] * len(lengths))
        state = t.zeros(len(lengths) + 1, VALUE_HEADS, HEAD, HEAD, dtype=torch.float32)
        few = min(lengths[0], _CHECKED)
        run = partial(
            gated_delta_prefill,
            m.mixed,
            m.projected,
            *m.parameters(),
            state,
            segments,
            config=getattr(chunk_configs, config) if config else None,
        )
        return Work(
            [run],
            2 * rows * (CONV_DIM + WIDTH - CONV_DIM + VALUE_SIZE) + 8 * len(lengths) * VALUE_HEADS * HEAD * HEAD,
            # Per tile of 64: K Kᵀ, Q Kᵀ, the inverse's two uses, and three products with the state.
            rows * VALUE_HEADS * (4 * 64 * HEAD * 2 + 3 * 2 * HEAD * HEAD),
            lambda result: (result[:few], exact_delta(m, slice(0, few), torch.zeros_like(state[1]))),
            _fla(m, rows, lengths, t),
        )

    return Case("gated_delta_prefill", f"{len(lengths)}x{lengths[0]}{' ' + config if config else ''}", make)


def _fla(m: _Mixer, rows: int, lengths: Sequence[int], t: Tensors) -> dict[str, Callable[[], object]]:
    """flash-linear-attention's kernel of the same rule, where it is installed: without the gated norm."""
    if t.device.type != "cuda" or find_spec("fla") is None:
        return {}
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    q, k = (m.mixed[:, at : at + 2048].view(1, rows, KEY_HEADS, HEAD).repeat_interleave(2, 2) for at in (0, 2048))
    v = m.mixed[:, 4096:].reshape(1, rows, VALUE_HEADS, HEAD)
    beta = torch.sigmoid(m.projected[:, -64:-32]).unsqueeze(0)
    g = (m.negative_a * F.softplus(m.projected[:, -32:].float() + m.dt_bias)).unsqueeze(0)
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=t.device, dtype=torch.int32)
    return {
        "fla chunk_gated_delta_rule": lambda: rule(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=begins
        )
    }


class _Paged:
    """B sequences of one context in their own pages."""

    def __init__(self, t: Tensors, rows: int, context: int, fp8: bool) -> None:
        blocks = -(-context // BLOCK)
        count = 1 + rows * blocks
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.kv = KvPages.allocate(count, BLOCK, KV_HEADS, DIM, dtype, t.device)
        if t.device.type == "cuda":
            for pages, scales in ((self.kv.keys, self.kv.key_scales), (self.kv.values, self.kv.value_scales)):
                pages.copy_(t.normal(*pages.shape))
                if scales is not None:
                    scales.fill_(1.0)
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(0)).add_(1).int()
        tables = torch.zeros(rows + 1, blocks, dtype=torch.int32)
        tables[1:] = order.view(rows, blocks)
        self.tables = tables.to(t.device)

    def contiguous(self, row: int, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence, [context, kv_heads, dim]."""
        blocks = self.tables[row + 1].long()
        found = [pages[blocks].flatten(0, 1)[:context].to(dtype) for pages in (self.kv.keys, self.kv.values)]
        return found[0], found[1]


def exact_attention(q: Tensor, gate: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [T, heads, d] at positions start …, over keys and values [start + T, kv_heads, d], gated; all in float64."""
    group = HEADS // KV_HEADS
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1).double() for x in (keys, values))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * DIM**-0.5
    hidden = torch.arange(len(keys), device=q.device) > start + torch.arange(len(q), device=q.device)[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return (weights @ v).transpose(0, 1).flatten(1) * torch.sigmoid(gate.double())


def attend_one(rows: int, context: int, fp8: bool, splits: int = 0) -> Case:
    """Decode attention; ``splits`` 0: what the engine would choose on 132 multiprocessors."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.attention.decode import DecodeWorkspace, decode_splits, paged_decode
        from kernels.gpu.launch.device import limits_of

        paged, chosen = (
            _Paged(t, rows, context, fp8),
            splits or decode_splits(rows, KV_HEADS, limits_of(torch.device("cuda"))),
        )
        q, projected = t.normal(rows, HEADS, DIM), t.normal(rows, 10240)
        run = partial(
            paged_decode,
            q,
            projected,
            paged.kv,
            paged.tables,
            t.ints(range(1, rows + 1)),
            t.ints([context - 1] * rows),
            chosen,
            workspace=DecodeWorkspace.allocate(rows, HEADS, KV_HEADS, chosen, DIM, t.device),
        )
        rivals: dict[str, Callable[[], object]] = {}
        if not fp8 and rows == 1 and t.device.type == "cuda":
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in paged.contiguous(0, context, torch.bfloat16))
            rivals["torch SDPA, contiguous"] = lambda: F.scaled_dot_product_attention(
                q.view(1, HEADS, 1, DIM), k, v, enable_gqa=True
            )
        stored = 1 + 4 / DIM if fp8 else 2
        return Work(
            [run],
            int(2 * rows * context * KV_HEADS * DIM * stored) + 6 * rows * HEADS * DIM,
            4 * rows * context * HEADS * DIM,
            lambda result: (
                result[:1],
                exact_attention(q[:1], projected[:1, :4096], *paged.contiguous(0, context, torch.float64), context - 1),
            ),
            rivals,
        )

    return Case("paged_decode", f"rows={rows} context={context} {'fp8' if fp8 else 'bf16'}", make)


def attend_segment(length: int, start: int, fp8: bool) -> Case:
    """Prefill attention of one segment."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.attention.prefill import paged_prefill

        context = start + length
        paged, segments = _Paged(t, 1, context, fp8), _segments(t, [length], [start])
        q, projected = t.normal(length, HEADS, DIM), t.normal(length, 10240)
        run = partial(paged_prefill, q, projected, paged.kv, paged.tables, segments)
        rivals: dict[str, Callable[[], object]] = {}
        if not fp8 and not start and t.device.type == "cuda":
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in paged.contiguous(0, context, torch.bfloat16))
            rivals["torch SDPA, contiguous"] = lambda: F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0), k, v, is_causal=True, enable_gqa=True
            )
        few = min(length, _CHECKED)

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = paged.contiguous(0, start + few, torch.float64)
            return result[:few], exact_attention(q[:few], projected[:few, :4096], keys, values, start)

        return Work(
            [run],
            2 * context * KV_HEADS * DIM * (1 if fp8 else 2) + 6 * length * HEADS * DIM,
            4 * HEADS * DIM * (length * start + length * (length + 1) // 2),
            check,
            rivals,
        )

    return Case("paged_prefill", f"{length} after {start} {'fp8' if fp8 else 'bf16'}", make)


def rope(rows: int, fp8: bool) -> Case:
    def make(t: Tensors) -> Work:
        from kernels.gpu.attention.qk_rope import qk_norm_rope_write
        from kernels.rope import Rotation, inverse_frequencies

        paged = _Paged(t, rows, BLOCK, fp8)
        projected, norm = t.normal(rows, 10240), 1 + t.normal(HEADS + KV_HEADS, DIM, scale=0.1, dtype=torch.float32)
        rotation = Rotation(inverse_frequencies(64, 1e7).to(t.device))
        positions = t.ints([index % BLOCK for index in range(rows)])
        run = partial(
            qk_norm_rope_write,
            projected,
            norm,
            EPS,
            rotation,
            positions,
            t.ints(range(1, rows + 1)),
            paged.tables,
            paged.kv,
        )

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            q = projected[:, 4096:8192].double().view(rows, HEADS, DIM)
            q = q / (q.square().mean(-1, keepdim=True) + EPS).sqrt() * norm[:HEADS].double()
            angle = positions.double()[:, None] * rotation.frequencies.double()
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = q[..., :32].clone(), q[..., 32:64].clone()
            q[..., :32], q[..., 32:64] = a * cos - b * sin, b * cos + a * sin
            return result, q

        return Work([run], 2 * rows * (6144 + 4096) + rows * 2048 * (1 if fp8 else 2), 0, check)

    return Case("qk_norm_rope_write", f"rows={rows} {'fp8' if fp8 else 'bf16'}", make)


def cases() -> Iterator[Case]:
    for rows in (1, 8, 16, 64, 256):
        yield conv_step(rows)
        yield delta_step(rows, torch.float32)
        yield delta_step(rows, torch.bfloat16)
        yield delta_step(rows, torch.float32, room=8)
        for warps in (4, 8):
            yield delta_verify(rows, 2, warps)
            yield delta_verify(rows, 4, warps)
        yield rope(rows, fp8=False)
    yield rope(64, fp8=True)
    for lengths in ([512], [8192], [512] * 16, [2048] * 4):
        yield conv_segments(lengths)
        yield delta_segments(lengths)
        for config in ("FEW", "MANY"):
            yield delta_segments(lengths, config)
    yield rope(8192, fp8=False)
    for rows, context in ((1, 640), (1, 8192), (1, 32768), (1, 131072), (8, 640), (16, 4224), (64, 640), (256, 640)):
        for fp8 in (False, True):
            yield attend_one(rows, context, fp8)
    for length, start in ((512, 0), (4096, 0), (8192, 0), (16384, 0), (512, 8192)):
        yield attend_segment(length, start, fp8=False)
    yield attend_segment(8192, 0, fp8=True)
