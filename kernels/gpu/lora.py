"""Low-rank additions of many adapters to one batch, on the GPU. Reference: kernels/lora.py.

``y[t] += B_s (A_s x[t])`` for each row t of slot s (Hu et al., arXiv 2106.09685; several adapters a batch: Punica,
arXiv 2310.18547; S-LoRA, arXiv 2311.03285). Two products: shrink, h = A x, and expand, y += B h.

Both walk over the *active* slots of the step, a list on the device, and compute each for all rows of a tile at once on
the tensor cores, keeping the rows that are the slot's. So the adapters' bytes are read once a step however many rows
share them, decodes and prefills are one kernel, and a row's result depends on no other row: a slot that is not the
row's adds nothing to it, not even a zero of the other sign. Rows of slot 0 are never touched.

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
    step: tl.constexpr = 16
    adapters = tl.load(row_adapters + rows, mask=rows < count, other=0)
    first, last = tl.min(columns, 0), tl.max(columns, 0)
    number = tl.load(active)
    index = 0
    while index < number:
        slot = tl.load(active + 1 + index)
        mine = (adapters == slot) & (rows < count)
        if tl.max(mine.to(tl.int32), 0) > 0:
            rank = tl.load(ranks + slot)
            slot_b = b + slot.to(tl.int64) * (RANK * width)
            for target in tl.static_range(targets):
                begin = 0 if target == 0 else ENDS[target - 1]
                end = ENDS[target]
                if (first < end) & (last >= begin):
                    inside = (columns >= begin) & (columns < end)
                    start = 0
                    while start < rank:
                        r = start + tl.arange(0, step)
                        keep = mine[:, None] & (r < rank)[None, :]
                        down = tl.zeros([rows.shape[0], step], dtype=tl.float32)
                        for split in tl.static_range(SPLITS):
                            place = (split * count + rows)[:, None] * (targets * RANK) + (target * RANK + r)[None, :]
                            down += tl.load(h + place, mask=keep, other=0.0)
                        up = tl.load(
                            slot_b + r[:, None] * width + columns[None, :],
                            mask=(r < rank)[:, None] & inside[None, :],
                            other=0.0,
                        )
                        acc = tl.dot(down.to(up.dtype), up, acc, input_precision=PRECISION)
                        start += step
        index += 1
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
    # Adapters and their rows lie still during a step: only x has to be waited for.
    if index >= tl.load(active):
        return
    slot = tl.load(active + 1 + index)
    rank = tl.load(ranks + slot)
    if BLOCK_R <= RANK and RANK % BLOCK_R == 0 and (part * BLOCK_R) % RANK >= rank:
        return
    mine = (tl.load(row_adapters + rows, mask=rows < count, other=0) == slot) & (rows < count)
    if tl.max(mine.to(tl.int32), 0) == 0:
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
        gdc_launch_dependents()
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


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How shrink() cuts its work."""

    block_m: int
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


def shrink_config(rows: int, depth: int) -> ShrinkConfig:
    """Few rows: many programs that share K between them, because a step of one row has nothing else to be parallel in;
    many rows: each program reads its rows once for all targets."""
    if rows <= 64:
        return ShrinkConfig(max(16, triton.next_power_of_2(rows)), 16, 128, max(1, min(4, depth // 256)), 4, 3)
    return ShrinkConfig(64, 64, 64, 1, 4, 3)


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
    use = config or shrink_config(rows, depth)
    h = torch.empty(use.splits, rows, targets * rank, dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(targets * rank, use.block_r)
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
