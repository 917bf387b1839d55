"""Low-rank additions of many adapters to one batch, on the GPU. Reference: kernels/lora.py.

``y[t] += B_s (A_s x[t])`` for each row t of slot s (Hu et al., arXiv 2106.09685; several adapters a batch: Punica,
arXiv 2310.18547; S-LoRA, arXiv 2311.03285). Two products: shrink, h = A x, and expand, y += B h.

Both walk over the *active* slots of the step, a list on the device, and compute each for all rows of a tile at once on
the tensor cores, keeping the rows that are the slot's. So the adapters' bytes are read once a step however many rows
share them, decodes and prefills are one kernel, and a row's result depends on no other row: a slot that is not the
row's adds nothing to it, not even a zero of the other sign. Rows of slot 0 are never touched. Of a few rows each
gathers its own slot's A instead, because there it is the latency that counts.

Nothing here looks at adapter numbers on the host: a captured CUDA graph serves any adapters.
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

from kernels.gpu.lora_rows import LoraRows

_PROGRAMS = 132
"""Multiprocessors of an H100 or H200."""

__all__ = [
    "ExpandConfig",
    "LoraRows",
    "ShrinkConfig",
    "expand_add",
    "expand_config",
    "expand_tile",
    "precision",
    "shrink",
    "shrink_config",
]


@triton.jit
def expand_tile(
    acc,
    rows,
    columns,
    h,
    b,
    row_adapters,
    active,
    ranks,
    count,
    width,
    ENDS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds B h to a float32 tile of the output, for use in the epilogue of a product.

    With a norm folded into the product, call it before the tile is multiplied by the row's 1/rms: shrink() leaves h
    without it.

    Args:
        acc: [M, N block] float32.
        rows: [M] row of the batch; those >= count are padding.
        columns: [N block] ascending neighbours; those >= width are padding.
        h: [SPLITS, count, targets * RANK] float32, what shrink() gave.
        b, row_adapters, active, ranks: of LoraRows. ``RANK`` is max_rank, ``ENDS`` is LoraRows.ends.
        count: rows of h. width: N.
        PRECISION: "ieee" for float32 weights, any other for half ones (tl.dot's input_precision).

    Returns:
        The new acc.
    """
    targets: tl.constexpr = len(ENDS)
    # Some slots at a time, side by side in the depth of one product: what is loaded for one does not wait for the
    # other. More would take the registers that the product around this needs.
    together: tl.constexpr = 8 if rows.shape[0] <= 16 and columns.shape[0] <= 16 else 2
    step: tl.constexpr = 16
    depth = tl.arange(0, together * step)
    lane = tl.arange(0, step)
    inside_rows = rows < count
    adapters = tl.load(row_adapters + rows, mask=inside_rows, other=0)
    row_rank = tl.load(ranks + adapters, mask=inside_rows & (adapters > 0), other=0)
    most = tl.max(row_rank, 0)
    number = tl.load(active)
    first, last = tl.min(columns, 0), tl.max(columns, 0)
    for target in tl.static_range(targets):
        begin = 0 if target == 0 else ENDS[target - 1]
        end = ENDS[target]
        if (first < end) & (last >= begin):
            inside = (columns >= begin) & (columns < end)
            start = 0
            while start < most:
                down = tl.zeros([rows.shape[0], step], dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    place = (split * count + rows)[:, None] * (targets * RANK) + (target * RANK + start + lane)[None, :]
                    down += tl.load(h + place, mask=(start + lane)[None, :] < row_rank[:, None], other=0.0)
                half = down.to(b.dtype.element_ty)
                r = start + depth % step
                index = 0
                while index < number:
                    member = index + depth // step
                    slot = tl.load(active + 1 + member, mask=member < number, other=-1)
                    mine = adapters[:, None] == slot[None, :]
                    if tl.max(tl.max(mine.to(tl.int32), 1), 0) > 0:
                        rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
                        up = tl.load(
                            (b + slot.to(tl.int64) * (RANK * width) + r * width)[:, None] + columns[None, :],
                            mask=(r < rank)[:, None] & inside[None, :],
                            other=0.0,
                        )
                        spread = tl.broadcast_to(half[:, None, :], [rows.shape[0], together, step])
                        spread = tl.reshape(spread, [rows.shape[0], together * step])
                        acc = tl.dot(tl.where(mine, spread, 0.0), up, acc, input_precision=PRECISION)
                    index += together
                start += step
    return acc


@triton.jit
def _expand_kernel(
    out,
    h,
    b,
    row_adapters,
    active,
    ranks,
    count,
    width,
    out_stride,
    ENDS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    adapters = tl.load(row_adapters + rows, mask=rows < count, other=0)
    if tl.max(adapters, 0) == 0:
        return
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc = expand_tile(
        acc, rows, columns, h, b, row_adapters, active, ranks, count, width, ENDS, RANK, SPLITS, PRECISION
    )
    place = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    keep = (adapters > 0)[:, None] & (columns < width)[None, :]
    base = tl.load(place, mask=keep, other=0.0)
    tl.store(place, (base.to(tl.float32) + acc).to(base.dtype), mask=keep)


@triton.jit
def _shrink_kernel(
    x,
    norm_weight,
    h,
    a,
    row_adapters,
    active,
    ranks,
    count,
    x_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    NORM: tl.constexpr,
    K_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: one slot, BLOCK_M rows, BLOCK_R (target, rank) pairs, one stretch of K.
    blocks: tl.constexpr = (TARGETS * RANK + BLOCK_R - 1) // BLOCK_R
    part, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    index = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Adapters and their rows lie still during a step: only x has to be waited for. A program without work waits as
    # well: the kernel behind this one takes the end of this one for the end of the one ahead.
    if PDL:
        gdc_launch_dependents()
    if index >= tl.load(active):
        if PDL:
            gdc_wait()
        return
    slot = tl.load(active + 1 + index)
    rank = tl.load(ranks + slot)
    if BLOCK_R <= RANK and RANK % BLOCK_R == 0 and (part * BLOCK_R) % RANK >= rank:
        if PDL:
            gdc_wait()
        return
    mine = (tl.load(row_adapters + rows, mask=rows < count, other=0) == slot) & (rows < count)
    if tl.max(mine.to(tl.int32), 0) == 0:
        if PDL:
            gdc_wait()
        return
    pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
    wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
    slot_a = a + slot.to(tl.int64) * (TARGETS * RANK * K)
    first = split * K_SPLIT
    end = min(first + K_SPLIT, K)
    k = first + tl.arange(0, BLOCK_K)
    pair_a = slot_a + pairs[None, :] * K
    down = tl.load(pair_a + k[:, None], mask=wanted[None, :] & (k < end)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    row_x = x + rows.to(tl.int64)[:, None] * x_stride
    for _ in range(0, K_SPLIT, BLOCK_K):
        value = tl.load(row_x + k[None, :], mask=mine[:, None] & (k < end)[None, :], other=0.0)
        if NORM:
            weight = tl.load(norm_weight + k, mask=k < end, other=0.0)
            value = (value.to(tl.float32) * weight[None, :]).to(value.dtype)
        acc = tl.dot(value, down, acc, input_precision=PRECISION)
        k += BLOCK_K
        down = tl.load(pair_a + k[:, None], mask=wanted[None, :] & (k < end)[:, None], other=0.0)
    place = (split * count + rows)[:, None] * (TARGETS * RANK) + pairs[None, :]
    tl.store(h + place, acc, mask=mine[:, None] & wanted[None, :])


@triton.jit
def _gather_kernel(
    x,
    norm_weight,
    h,
    a,
    row_adapters,
    ranks,
    count,
    x_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    NORM: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: one row, BLOCK_R (target, rank) pairs, all of its stretch of K at once: every load is in flight
    # before the first is used, and those of the adapter before the kernel ahead has ended.
    blocks: tl.constexpr = (TARGETS * RANK + BLOCK_R - 1) // BLOCK_R
    part, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    row = tl.program_id(1)
    # The product behind asks for its weights meanwhile; it reads nothing of this kernel before this one's end.
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(row_adapters + row)
    rank = tl.load(ranks + slot)
    pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
    wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank) & (slot > 0)
    k = split * K_SPLIT + tl.arange(0, BLOCK_K)
    inside = k < min(split * K_SPLIT + K_SPLIT, K)
    place = a + slot.to(tl.int64) * (TARGETS * RANK * K) + pairs[:, None] * K + k[None, :]
    down = tl.load(place, mask=wanted[:, None] & inside[None, :], other=0.0)
    if NORM:
        weight = tl.load(norm_weight + k, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=inside & (slot > 0), other=0.0)
    if NORM:
        value = (value.to(tl.float32) * weight).to(value.dtype)
    acc = tl.sum(down.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
    tl.store(h + (split * count + row) * (TARGETS * RANK) + pairs, acc, mask=wanted)


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How shrink() cuts its work."""

    block_m: int
    """Rows of a program; 1: a kernel without tensor cores, a program a row."""
    block_r: int
    block_k: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How expand_add() cuts its work."""

    block_m: int
    block_n: int
    warps: int


_INVARIANT = ShrinkConfig(64, 16, 128, 4, 4, 3)
"""For any number of rows."""


def shrink_config(rows: int, depth: int, pairs: int) -> ShrinkConfig:
    """The cut for x [rows, depth] and ``pairs`` = targets · max_rank. Few rows have nothing to be parallel in but
    pairs and K; of many rows each program reads its own once for all pairs."""
    if rows <= 16:
        splits = 1 if depth <= 4096 else -(-depth // 4096)
        block_k = triton.next_power_of_2(triton.cdiv(depth, splits))
        return ShrinkConfig(1, 2 if pairs >= 64 else 1, block_k, splits, 4, 1)
    if rows <= 64:
        return ShrinkConfig(triton.next_power_of_2(rows), 16, 128, max(1, min(4, depth // 256)), 4, 3)
    programs = triton.cdiv(rows, 64) * triton.cdiv(pairs, 64)
    return ShrinkConfig(64, 64, 64, max(1, min(4, _PROGRAMS // programs)), 4, 3)


def expand_config(rows: int) -> ExpandConfig:
    """Tiles of the output that fit the registers."""
    if rows <= 64:
        return ExpandConfig(max(16, triton.next_power_of_2(rows)), 64, 4)
    return ExpandConfig(64, 128, 4)


def shrink(
    x: Tensor,
    lora: LoraRows,
    norm_weight: Tensor | None = None,
    *,
    config: ShrinkConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """A x of every row's adapter.

    Args:
        x: [T, K], rows contiguous.
        norm_weight: [K] float32: an RMSNorm's weight to multiply x by; its 1/rms is left to who uses h, because the
            product that h goes into needs it too.

    Returns:
        [splits, T, targets * max_rank] float32, to be summed over splits. Only what expand reads is written: rows with
        an adapter, up to its rank; the rest is not initialised.
    """
    rows, depth = x.shape
    _, targets, rank, width = lora.a.shape
    if width != depth or x.stride(1) != 1:
        raise ValueError(f"x must be [T, {width}] with contiguous rows, got {list(x.shape)} strides {x.stride()}")
    use = config or (_INVARIANT if lora.invariant else shrink_config(rows, depth, targets * rank))
    h = torch.empty(use.splits, rows, targets * rank, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(targets * rank, use.block_r)
    if use.block_m == 1:
        if use.block_k * use.splits < depth:
            raise ValueError(f"{use.splits} splits of block_k {use.block_k} do not cover {depth} inputs")
        _gather_kernel[blocks * use.splits, rows](
            x,
            norm_weight,
            h,
            lora.a,
            lora.row_adapters,
            lora.ranks,
            rows,
            x.stride(0),
            K=depth,
            RANK=rank,
            TARGETS=targets,
            NORM=norm_weight is not None,
            K_SPLIT=triton.cdiv(triton.cdiv(depth, use.splits), 16) * 16,
            BLOCK_R=use.block_r,
            BLOCK_K=use.block_k,
            PDL=pdl,
            num_warps=use.warps,
            launch_pdl=pdl,
        )
        return h
    grid = (blocks * use.splits, max(1, min(lora.capacity, rows)), triton.cdiv(rows, use.block_m))
    _shrink_kernel[grid](
        x,
        norm_weight,
        h,
        lora.a,
        lora.row_adapters,
        lora.active,
        lora.ranks,
        rows,
        x.stride(0),
        K=depth,
        RANK=rank,
        TARGETS=targets,
        NORM=norm_weight is not None,
        K_SPLIT=triton.cdiv(triton.cdiv(depth, use.splits), use.block_k) * use.block_k,
        PRECISION=precision(x.dtype),
        BLOCK_M=use.block_m,
        BLOCK_R=use.block_r,
        BLOCK_K=use.block_k,
        PDL=pdl,
        num_warps=use.warps,
        num_stages=use.stages,
        launch_pdl=pdl,
    )
    return h


def expand_add(
    h: Tensor, lora: LoraRows, out: Tensor, *, config: ExpandConfig | None = None, pdl: bool = False
) -> None:
    """Adds B h of every row's adapter, in place.

    Args:
        h: what shrink() gave.
        out: [T, N], rows contiguous.
    """
    splits, rows, _ = h.shape
    rank, width = lora.b.shape[1:]
    if out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {width}] with contiguous rows, got {list(out.shape)}")
    use = config or expand_config(rows)
    _expand_kernel[triton.cdiv(width, use.block_n), triton.cdiv(rows, use.block_m)](
        out,
        h,
        lora.b,
        lora.row_adapters,
        lora.active,
        lora.ranks,
        rows,
        width,
        out.stride(0),
        ENDS=lora.ends,
        RANK=rank,
        SPLITS=splits,
        PRECISION=precision(lora.b.dtype),
        BLOCK_M=use.block_m,
        BLOCK_N=use.block_n,
        PDL=pdl,
        num_warps=use.warps,
        launch_pdl=pdl,
    )


def precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision: float32 is computed as such, not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
