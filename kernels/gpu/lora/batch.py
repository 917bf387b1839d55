"""Low-rank additions of many adapters to one batch, on the GPU. Reference: kernels/lora.py.

``y[t] += B_s (A_s x[t])`` for each row t of slot s (Hu et al., arXiv 2106.09685; several adapters a batch: Punica,
arXiv 2310.18547; S-LoRA, arXiv 2311.03285). Two products: shrink, h = A x (kernels/gpu/lora/shrink.py), and expand,
y += B h, here within the product that y comes from; as a kernel of its own in kernels/gpu/lora/expand.py.

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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.gpu.lora.rows import LoraRows

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
"""Part of a batch that is known when a kernel is compiled (LORA in kernels): ends of the targets, R, splits, and how
many slots one product takes side by side."""


def shape_of(adapters: Adapters, lora: LoraRows, most_slots: int) -> Shape:
    """LORA of a kernel that takes up to ``most_slots`` (a power of two) slots at a time."""
    slots = 1
    while 2 * slots <= min(most_slots, lora.capacity):
        slots *= 2
    return lora.ends, lora.b.shape[1], adapters.hidden.shape[0], slots


@triton.jit
def target_of(column, LORA: tl.constexpr):
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
def _places(slots, ranks, start, SLOTS: tl.constexpr):
    """The slot of each of [slots · 16] ranks from ``start`` on, -1 beyond the slot's rank: there B is zero, but h is
    whatever memory held."""
    return tl.where(start + tl.arange(0, SLOTS * _STEP) % _STEP < ranks, slots, -1)


@triton.jit
def _add(acc, lora, b, hidden, adapters, places, SLOTS: tl.constexpr):
    """acc [columns, rows] plus B [columns, slots · 16] times h [16, rows] of each row's own slot."""
    b = b.to(lora.b.dtype.element_ty, bitcast=True)
    h = tl.sum(hidden, axis=0)
    spread = tl.broadcast_to(h.to(b.dtype)[None, :, :], [SLOTS, _STEP, h.shape[1]])
    spread = tl.reshape(spread, [SLOTS * _STEP, h.shape[1]])
    spread = tl.where(places[:, None] == adapters[None, :], spread, 0.0)
    exact: tl.constexpr = b.dtype == tl.float32
    return tl.dot(b, spread, acc, input_precision="ieee" if exact else "tf32")


@triton.jit
def walk(
    acc,
    done,
    passed,
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
    """acc plus B h of targets ``lowest`` … ``highest``, SLOTS slots and 16 ranks a turn; of targets up to
    ``passed`` the first ranks of the first ``done`` slots have been added already."""
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
            places = _places(slots, ranks, start, SLOTS)
            target = lowest
            while target <= highest:
                if (index >= done) | (start > 0) | (target > passed):
                    own = inside & (target_of(columns, LORA) == target)
                    b = _load_b(lora, columns, own, width, slots, places >= 0, start, LORA, SLOTS)
                    hidden = _load_hidden(lora, rows, count, target, start, LORA)
                    acc = _add(acc, lora, b, hidden, adapters, places, SLOTS)
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
        count: rows of the batch.
        width: N.
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
    own = inside & (target_of(columns, LORA) == target_of(first, LORA))
    b = _load_b(lora, columns, own, width, slots, live, 0, LORA, together)
    deep = (number > together) | (tl.max(ranks, 0) > _STEP)
    return number, adapters, _places(slots, ranks, 0, together), deep, b


@triton.jit
def hidden_ahead(lora, rows, first, count, LORA: tl.constexpr):
    """Loads h of the target that column ``first`` belongs to, for add_adapters(); not of rows >= count."""
    return _load_hidden(lora, rows, count, target_of(first, LORA), 0, LORA)


@triton.jit
def add_adapters(
    acc,
    ahead,
    hidden,
    lora,
    rows,
    columns,
    inside,
    first,
    last,
    count,
    width,
    LORA: tl.constexpr,
    CROWDED: tl.constexpr = False,
):
    """Adds B h to a float32 tile of the output, columns first: [N block, M].

    With a norm folded into the product, call it before the tile is multiplied by the row's 1/rms: h is without it.

    Args:
        ahead: of adapters_ahead(), called with the same rows, columns, inside.
        hidden: of hidden_ahead(), called with the same rows, first.
        first, last: of ``columns``, scalars.
        CROWDED: there are no registers for a second B of all slots.
    """
    together: tl.constexpr = LORA[3]
    ends: tl.constexpr = LORA[0]
    number, adapters, places, deep, b = ahead
    if number > 0:
        lowest = target_of(first, LORA)
        highest = target_of(last, LORA)
        acc = _add(acc, lora, b, hidden, adapters, places, together)
        passed = lowest
        if len(ends) > 1 and not CROWDED:
            while passed < highest:
                passed += 1
                own = inside & (target_of(columns, LORA) == passed)
                next_b = _load_b(lora, columns, own, width, places, places >= 0, 0, LORA, together)
                next_hidden = _load_hidden(lora, rows, count, passed, 0, LORA)
                acc = _add(acc, lora, next_b, next_hidden, adapters, places, together)
        if deep | (highest > passed):
            # Fewer at a time than before, where registers are as many as the product has left.
            fewer: tl.constexpr = min(together, 4 if rows.shape[0] == 16 and columns.shape[0] >= 64 else 2)
            acc = walk(
                acc, together, passed, number, adapters, lora, rows, columns, inside, lowest, highest, count, width,
                LORA, fewer,
            )  # fmt: skip
    return acc


@triton.jit
def adapters_of_row_ahead(lora, slot, columns, inside, width, LORA: tl.constexpr):
    """adapters_ahead() of a single row with this slot of ``row_adapters``, for add_adapters_to_row()."""
    largest: tl.constexpr = LORA[1]
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
    place = r * width + target_of(columns, LORA)[None, :] * largest + i[:, None]
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
