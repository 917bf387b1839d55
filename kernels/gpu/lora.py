"""Low-rank additions of many adapters to one batch, on the GPU. Reference: kernels/lora.py.

``y[t] += B_s (A_s x[t])`` for each row t of slot s (Hu et al., arXiv 2106.09685; several adapters a batch: Punica,
arXiv 2310.18547; S-LoRA, arXiv 2311.03285). Two products: shrink, h = A x (kernels/gpu/preparation.py), and expand,
y += B h, here: within the product that y comes from, or as a kernel of its own.

Expansion walks over the *active* slots of the step, a list on the device, some slots side by side in the depth of one
product on tensor cores, h of each row at its own slot's place and zeros elsewhere: adapters are read once a step
however many rows share them, decodes and prefills are one kernel, and a row's result depends on no other row. Within a
product the weights take all the time there is, so what an expansion reads is asked for before it and used behind it:
``adapters_ahead`` before the kernel ahead has ended, ``hidden_ahead`` after, ``add_adapters`` behind the product.

Nothing here looks at adapter numbers on the host: a captured CUDA graph serves any adapters.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.lora_rows import LoraRows
from kernels.gpu.preparation import ShrinkConfig, shrink, shrink_config

__all__ = [
    "Adapters",
    "ExpandConfig",
    "LoraRows",
    "ShrinkConfig",
    "adapters_ahead",
    "adapters_of_row_ahead",
    "add_adapters",
    "add_adapters_to_row",
    "expand_add",
    "expand_config",
    "hidden_ahead",
    "hidden_of_row_ahead",
    "shape_of",
    "shrink",
    "shrink_config",
]

_STEP = tl.constexpr(16)
"""Ranks that a product of tensor cores takes at least."""


class Adapters(NamedTuple):
    """The low-rank additions of a step, as a kernel takes them: the tensors of LoraRows and what shrink() made of x."""

    hidden: Any
    """[splits, T, targets · R] float32."""
    b: Any
    """[slots, R, N]."""
    row_adapters: Any
    active: Any
    ranks: Any


Shape = tuple[tuple[int, ...], int, int, int]
"""What of it is known when a kernel is compiled (LORA in kernels): ends of the targets, R, splits, and how many slots
one product takes side by side."""


def shape_of(adapters: Adapters, lora: LoraRows, most_slots: int) -> Shape:
    """LORA of a kernel that takes up to ``most_slots`` (a power of two) slots at a time."""
    slots = 1
    while 2 * slots <= min(most_slots, lora.capacity):
        slots *= 2
    return lora.ends, lora.b.shape[1], adapters.hidden.shape[0], slots


@triton.jit
def _target_of(column, LORA: tl.constexpr):
    ends: tl.constexpr = LORA[0]
    target = column * 0
    for t in tl.static_range(len(ends) - 1):
        target += (column >= ends[t]).to(tl.int32)
    return target


@triton.jit
def _load_b(lora, columns, inside, width, slots, live, start, LORA: tl.constexpr, SLOTS: tl.constexpr):
    """[columns, slots · 16]: B of ranks ``start`` … of each slot [slots · 16], as integers that _add() takes for what
    they are: from numbers the compiler would make an operand in shared memory at once, where the copy engine's tiles
    are to be."""
    largest: tl.constexpr = LORA[1]
    r = start + tl.arange(0, SLOTS * _STEP) % _STEP
    bits: tl.constexpr = tl.int16 if lora.b.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    base = lora.b.to(tl.pointer_type(bits))
    place = base + (slots.to(tl.int64) * (largest * width) + r * width)[None, :] + columns[:, None]
    return tl.load(place, mask=(live & (r < largest))[None, :] & inside[:, None], other=0)


@triton.jit
def _load_hidden(lora, rows, count, target, start, LORA: tl.constexpr):
    """[splits, 16, rows]: A x of one target, not yet summed because that would wait for it."""
    ends: tl.constexpr = LORA[0]
    largest: tl.constexpr = LORA[1]
    splits: tl.constexpr = LORA[2]
    pairs: tl.constexpr = len(ends) * largest
    split = tl.arange(0, triton.next_power_of_2(splits))[:, None, None]
    r = start + tl.arange(0, _STEP)[None, :, None]
    place = lora.hidden + (split * count + rows[None, None, :]) * pairs + target * largest + r
    return tl.load(place, mask=(split < splits) & (rows[None, None, :] < count) & (r < largest), other=0.0)


@triton.jit
def _add(acc, lora, b, hidden, adapters, slots, ranks, start, SLOTS: tl.constexpr):
    """acc [columns, rows] plus B [columns, slots · 16] times h [16, rows] of each row's own slot."""
    b = b.to(lora.b.dtype.element_ty, bitcast=True)
    h = tl.sum(hidden, axis=0)
    depth: tl.constexpr = SLOTS * _STEP
    spread = tl.broadcast_to(h.to(b.dtype)[None, :, :], [SLOTS, _STEP, h.shape[1]])
    spread = tl.reshape(spread, [depth, h.shape[1]])
    # Beyond a rank h is whatever memory held, and B zero.
    there = start + tl.arange(0, depth) % _STEP < ranks
    spread = tl.where((slots[:, None] == adapters[None, :]) & there[:, None], spread, 0.0)
    exact: tl.constexpr = b.dtype == tl.float32
    return tl.dot(b, spread, acc, input_precision="ieee" if exact else "tf32")


@triton.jit
def _walk(
    acc,
    done,
    number,
    adapters,
    lora,
    rows,
    columns,
    inside,
    lowest,
    highest,
    count,
    width,
    LORA: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """acc plus B h of targets ``lowest`` … ``highest``, SLOTS slots and 16 ranks a turn; of the first target and the
    first ranks the first ``done`` slots have been added already."""
    member = tl.arange(0, SLOTS * _STEP) // _STEP
    index = 0
    while index < number:
        live = index + member < number
        slots = tl.load(lora.active + 1 + index + member, mask=live, other=0)
        ranks = tl.load(lora.ranks + slots, mask=live, other=0)
        # Of a prompt's tile all rows have one slot: most groups of slots have none of it, as a rule.
        near = (adapters >= tl.min(tl.where(live, slots, 2**30), 0)) & (adapters <= tl.max(slots, 0))
        used = tl.max(near.to(tl.int32), 0) * tl.max(ranks, 0)
        start = 0
        while start < used:
            target = lowest
            while target <= highest:
                if (index >= done) | (start + target > lowest):
                    own = inside & (_target_of(columns, LORA) == target)
                    b = _load_b(lora, columns, own, width, slots, live & (start < ranks), start, LORA, SLOTS)
                    hidden = _load_hidden(lora, rows, count, target, start, LORA)
                    acc = _add(acc, lora, b, hidden, adapters, slots, ranks, start, SLOTS)
                target += 1
            start += _STEP
        index += SLOTS
    return acc


@triton.jit
def adapters_ahead(lora, rows, columns, inside, first, count, width, split, LORA: tl.constexpr):
    """Loads what lies still during a step and is most probably all that a tile needs: B of the first slots and of the
    target that column ``first`` belongs to.

    Args:
        rows: [M] row of the batch; those >= count are padding.
        columns: [N block] of the output, neighbours as the compiler sees them; [N block] ``inside`` those that exist,
            ``first`` the first of them.
        count: rows of the batch. width: N.
        split: which of the programs that share this tile; the first adds the adapters.

    Returns:
        For add_adapters().
    """
    together: tl.constexpr = LORA[3]
    member = tl.arange(0, together * _STEP) // _STEP
    number = tl.load(lora.active, mask=split == 0, other=0)
    slots = tl.load(lora.active + 1 + member)
    adapters = tl.load(lora.row_adapters + rows, mask=rows < count, other=0)
    live = member < number
    ranks = tl.load(lora.ranks + slots, mask=live, other=0)
    own = inside & (_target_of(columns, LORA) == _target_of(first, LORA))
    return number, adapters, slots, ranks, _load_b(lora, columns, own, width, slots, live, 0, LORA, together)


@triton.jit
def hidden_ahead(lora, rows, first, count, LORA: tl.constexpr):
    """Loads h of the target that column ``first`` belongs to, for add_adapters()."""
    return _load_hidden(lora, rows, count, _target_of(first, LORA), 0, LORA)


@triton.jit
def add_adapters(
    acc, ahead, hidden, lora, rows, columns, inside, first, last, count, width, LORA: tl.constexpr
):  # fmt: skip
    """Adds B h to a float32 tile of the output, columns first: [N block, M].

    With a norm folded into the product, call it before the tile is multiplied by the row's 1/rms: h is without it.

    Args:
        ahead: of adapters_ahead(), called with the same rows, columns, inside.
        hidden: of hidden_ahead(), called with the same rows, first.
        first, last: of ``columns``, scalars.
    """
    together: tl.constexpr = LORA[3]
    number, adapters, slots, ranks, b = ahead
    if number > 0:
        lowest = _target_of(first, LORA)
        highest = _target_of(last, LORA)
        acc = _add(acc, lora, b, hidden, adapters, slots, ranks, 0, together)
        # More slots, higher ranks, or columns of more targets than one.
        if (number > together) | (tl.max(ranks, 0) > _STEP) | (highest > lowest):
            # Fewer at a time than before, where registers are as many as the product has left.
            fewer: tl.constexpr = min(together, 4 if rows.shape[0] == 16 and columns.shape[0] >= 64 else 2)
            acc = _walk(
                acc, together, number, adapters, lora, rows, columns, inside, lowest, highest, count, width, LORA, fewer
            )
    return acc


@triton.jit
def adapters_of_row_ahead(lora, r, columns, inside, width, LORA: tl.constexpr):
    """adapters_ahead() of a single row, for add_adapters_to_row()."""
    largest: tl.constexpr = LORA[1]
    slot = tl.load(lora.row_adapters + r)
    i = tl.arange(0, _STEP)
    place = lora.b + slot.to(tl.int64) * (largest * width) + i[:, None] * width + columns[None, :]
    keep = (slot > 0) & (i < largest)[:, None] & inside[None, :]
    return slot, tl.load(lora.ranks + slot), tl.load(place, mask=keep, other=0.0)


@triton.jit
def hidden_of_row_ahead(lora, r, columns, inside, start, count, LORA: tl.constexpr):
    """h of a single row, ranks ``start`` … of each column's target: [16, N block] of each split."""
    ends: tl.constexpr = LORA[0]
    largest: tl.constexpr = LORA[1]
    splits: tl.constexpr = LORA[2]
    i = start + tl.arange(0, _STEP)
    width: tl.constexpr = len(ends) * largest
    place = r * width + _target_of(columns, LORA)[None, :] * largest + i[:, None]
    keep = inside[None, :] & (i < largest)[:, None]
    parts = ()
    for split in tl.static_range(splits):
        parts = parts + (tl.load(lora.hidden + split * count * width + place, mask=keep, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def add_adapters_to_row(acc, ahead, hidden, lora, r, columns, inside, count, width, LORA: tl.constexpr):
    """add_adapters() for a tile of one row [N block], without tensor cores."""
    largest: tl.constexpr = LORA[1]
    splits: tl.constexpr = LORA[2]
    slot, rank, b = ahead
    if slot > 0:
        start = 0
        while start < rank:
            i = start + tl.arange(0, _STEP)
            if start > 0:
                hidden = hidden_of_row_ahead(lora, r, columns, inside, start, count, LORA)
                place = lora.b + slot.to(tl.int64) * (largest * width) + i[:, None] * width + columns[None, :]
                b = tl.load(place, mask=inside[None, :] & (i < rank)[:, None], other=0.0)
            h = hidden[0]
            for split in tl.static_range(splits - 1):
                h += hidden[split + 1]
            acc += tl.sum(tl.where((i < rank)[:, None], h * b.to(tl.float32), 0.0), axis=0)
            start += _STEP
    return acc


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    out,
    lora,
    count,
    width,
    out_stride,
    LORA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    inside = columns < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    adapters = tl.load(lora.row_adapters + rows, mask=rows < count, other=0)
    if tl.max(adapters, 0) > 0:
        lowest = _target_of(first, LORA)
        highest = _target_of(tl.minimum(first + BLOCK_N, width) - 1, LORA)
        number = tl.load(lora.active)
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        acc = _walk(acc, 0, number, adapters, lora, rows, columns, inside, lowest, highest, count, width, LORA, LORA[3])
        place = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        keep = (adapters > 0)[:, None] & inside[None, :]
        base = tl.load(place, mask=keep, other=0.0)
        tl.store(place, (base.to(tl.float32) + tl.trans(acc)).to(base.dtype), mask=keep)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How expand_add() cuts its work."""

    block_m: int
    block_n: int
    warps: int
    slots: int = 1
    """Side by side, at most."""


def expand_config(rows: int) -> ExpandConfig:
    """Tiles of the output that fit the registers. Few rows mix their slots, tiles of many mostly have one."""
    if rows <= 64:
        return ExpandConfig(max(16, triton.next_power_of_2(rows)), 64, 4, 8)
    return ExpandConfig(64, 128, 4)


def expand_add(
    h: Tensor, lora: LoraRows, out: Tensor, *, config: ExpandConfig | None = None, pdl: bool = False
) -> None:
    """Adds B h of every row's adapter, in place.

    Args:
        h: what shrink() gave.
        out: [T, N], rows contiguous.
    """
    rows, width = h.shape[1], lora.b.shape[2]
    if out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {width}] with contiguous rows, got {list(out.shape)}")
    use = config or expand_config(rows)
    adapters = Adapters(h, lora.b, lora.row_adapters, lora.active, lora.ranks)
    _expand_kernel[triton.cdiv(width, use.block_n), triton.cdiv(rows, use.block_m)](
        out,
        adapters,
        rows,
        width,
        out.stride(0),
        LORA=shape_of(adapters, lora, use.slots),
        BLOCK_M=use.block_m,
        BLOCK_N=use.block_n,
        PDL=pdl,
        num_warps=use.warps,
        launch_pdl=pdl,
    )
