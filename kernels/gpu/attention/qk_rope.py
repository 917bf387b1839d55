"""Norm and rotation of queries and keys, and the write of keys and values to their pages, in one kernel.

References: `kernels.rms_norm.rms_norm`, `kernels.rope.apply_rope`, `kernels.attention.write_pages`,
`kernels.gpu.attention.pages.quantize_heads`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.attention.pages import KvPages
from kernels.gpu.elementary import inverse_root
from kernels.rope import Rotation

_MANY_ROWS = 256
"""Number of rows from which on a program takes several heads, so that a rotation's cosines serve more than one."""


@triton.jit
def cosine_sine(angle):
    """Cosine and sine of float32 angles of any size. Quarter turns are taken off in float64: float32 leaves too little
    of an angle of 1e5, and the device library's own reduction of such angles goes through local memory. The polynomials
    on the rest, within π/4, are those of Cephes' cosf and sinf (Moshier, Methods and Programs for Mathematical
    Functions)."""
    quarters = angle.to(tl.float64) * 0.6366197723675814
    whole = tl.floor(quarters + 0.5)
    x = ((quarters - whole) * 1.5707963267948966).to(tl.float32)
    quadrant = whole.to(tl.int32) & 3
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    swap = (quadrant & 1) == 1
    c = tl.where(swap, sine, cosine)
    s = tl.where(swap, cosine, sine)
    return tl.where((quadrant == 1) | (quadrant == 2), -c, c), tl.where(quadrant >= 2, -s, s)


@triton.jit
def rotation_of(position, frequency, column, HALF: tl.constexpr, SCALE: tl.constexpr):
    """Cosine and signed sine, [rows, columns], that the columns of a head are rotated with; past the rotation 1 and 0.

    ``frequency`` is 0 past the rotation; ``SCALE`` is the factor of both within it."""
    # The product is rounded to float32, as in the reference.
    cosine, sine = cosine_sine(position.to(tl.float32)[:, None] * frequency[None, :])
    if SCALE != 1.0:
        cosine = tl.where((column < 2 * HALF)[None, :], cosine * SCALE, cosine)
        sine = sine * SCALE
    return cosine, tl.where((column < HALF)[None, :], -sine, sine)


@triton.jit
def _write(pages, scales, place, head, kv_heads, x, column, inside, stored, DIM: tl.constexpr, FP8: tl.constexpr):
    """Puts x [ROWS, BLOCK] float32 at flat places [ROWS] of the pages."""
    row = place * kv_heads + head
    if FP8:
        amax = tl.max(tl.abs(x), axis=1)
        scale = tl.where(amax > 0, amax / 448.0, 1.0)
        tl.store(scales + row, scale, mask=stored)
        x = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    tl.store(pages + row[:, None] * DIM + column[None, :], x.to(pages.dtype.element_ty), mask=inside)


# Numbers that change with the step or the settings must not compile another variant.
@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=["positions", "row_slots"])
def _qk_rope_kernel(
    projected,
    qk_norm,
    inverse_frequency,
    positions,
    row_slots,
    tables,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    rows,
    eps,
    projected_stride,
    table_stride,
    block_size,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    SCALE: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS_A_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_head = tl.program_id(1) * HEADS_A_PROGRAM
    real = row < rows
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < DIM)[None, :]
    # Each element is rotated with its partner half a rotation further or back; past the rotation, with nothing.
    rotated = column < 2 * HALF
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    has_partner = real[:, None] & rotated[None, :]
    frequency = tl.load(inverse_frequency + tl.where(column < HALF, column, column - HALF), mask=rotated, other=0.0)
    if PDL:
        gdc_launch_dependents()
    position = tl.load(positions + row, mask=real, other=0)
    slot = tl.load(row_slots + row, mask=real, other=0).to(tl.int64)
    block = tl.load(tables + slot * table_stride + position // block_size, mask=real, other=0).to(tl.int64)
    place = block * block_size + position % block_size
    cosine, sine = rotation_of(position, frequency, column, HALF, SCALE)
    if PDL:
        gdc_wait()
    base = projected + row.to(tl.int64)[:, None] * projected_stride
    for index in tl.static_range(HEADS_A_PROGRAM):
        head = first_head + index
        source = base + (HEADS + head) * DIM
        x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + partner[None, :], mask=has_partner, other=0.0).to(tl.float32)
        weight = tl.load(qk_norm + head * DIM + column, mask=column < DIM, other=0.0)
        partner_weight = tl.load(qk_norm + head * DIM + partner, mask=rotated, other=0.0)
        scale = inverse_root(tl.sum(x * x, axis=1) / DIM + eps)
        x = scale[:, None] * (x * weight[None, :] * cosine + y * partner_weight[None, :] * sine)
        if head < HEADS:
            target = out + (row.to(tl.int64)[:, None] * HEADS + head) * DIM
            tl.store(target + column[None, :], x.to(out.dtype.element_ty), mask=inside)
        else:
            kv_head = head - HEADS
            _write(keys, key_scales, place, kv_head, KV_HEADS, x, column, inside, real, DIM, FP8)
            v = tl.load(source + KV_HEADS * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
            _write(values, value_scales, place, kv_head, KV_HEADS, v, column, inside, real, DIM, FP8)


def qk_norm_rope_write(
    projected: Tensor,
    qk_norm: Tensor,
    eps: float,
    rotation: Rotation,
    positions: Tensor,
    row_slots: Tensor,
    tables: Tensor,
    kv: KvPages,
    *,
    out: Tensor | None = None,
    rows_a_program: int = 0,
    heads_a_program: int = 0,
    num_warps: int = 0,
    pdl: bool = False,
) -> Tensor:
    """Per-head RMSNorm and rope of queries and keys; keys and values to their pages.

    Rope rotates pairs (i, i + R/2) of the first R dimensions by ``position · inv_freq[i]`` (Su et al., RoFormer, arXiv
    2104.09864; transformers' modeling_qwen3_5.apply_rotary_pos_emb). Everything between load and store is float32.

    Args:
        projected: [T, (2 heads + 2 kv_heads) · head_dim] bf16 or float32, columns gate | query | key | value.
        qk_norm: [heads + kv_heads, head_dim] float32: 1 + w of each query head, then of each key head.
        eps: of the norm.
        rotation: of the first dimensions of each head.
        positions: [T] int32.
        row_slots: [T] int32: row of ``tables`` of each row. Padded rows: slot 0, position 0.
        tables: [num_slots, max_blocks] int32; row 0 all zeros.
        kv: where keys and values go; e4m3 pages get a scale a token and head.
        out: [T, heads, head_dim], where to write the queries.
        rows_a_program, heads_a_program, num_warps: chosen by T if 0.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``positions``, ``row_slots`` or ``tables``.

    Returns:
        Queries [T, heads, head_dim] in projected's dtype, contiguous.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, width = projected.shape
    total, dim = qk_norm.shape
    heads, half = total - kv.kv_heads, rotation.half
    if width != 2 * total * dim or dim != kv.head_dim or 2 * half > dim or projected.stride(1) != 1:
        raise ValueError(
            f"qk_norm_rope_write: projected {tuple(projected.shape)}, qk_norm {tuple(qk_norm.shape)}, "
            f"pages {tuple(kv.keys.shape)}, {half} rotated pairs"
        )
    if positions.shape != (rows,) or row_slots.shape != (rows,) or tables.stride(1) != 1:
        raise ValueError(f"qk_norm_rope_write: {rows} rows, positions {tuple(positions.shape)}")
    if out is None:
        out = torch.empty(rows, heads, dim, dtype=projected.dtype, device=projected.device)
    if rows == 0:
        return out
    many = rows >= _MANY_ROWS
    group = heads_a_program or (max(n for n in range(1, 6) if total % n == 0) if many else 1)
    tile = rows_a_program or 1
    if total % group:
        raise ValueError(f"qk_norm_rope_write: heads_a_program ({group}) must divide {total} heads")
    key_scales = kv.keys if kv.key_scales is None else kv.key_scales
    value_scales = kv.values if kv.value_scales is None else kv.value_scales
    _qk_rope_kernel[(triton.cdiv(rows, tile), total // group)](
        projected,
        qk_norm,
        rotation.frequencies,
        positions,
        row_slots,
        tables,
        kv.keys,
        kv.values,
        key_scales,
        value_scales,
        out,
        rows,
        eps,
        projected.stride(0),
        tables.stride(0),
        kv.block_size,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        DIM=dim,
        HALF=half,
        SCALE=rotation.scale,
        FP8=kv.quantized,
        ROWS=tile,
        HEADS_A_PROGRAM=group,
        BLOCK=triton.next_power_of_2(dim),
        PDL=pdl,
        num_warps=num_warps or (1 if many or kv.quantized else 2),
        launch_pdl=pdl,
    )
    return out
