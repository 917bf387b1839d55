"""Low-rank additions of many adapters to one batch. References in plain torch.

``y += B_s (A_s x)`` for each row of slot s (Hu et al., arXiv 2106.09685; several adapters a batch: Punica, arXiv
2310.18547). The scale is already in B. Slot 0 adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def add_lora(x: Tensor, a: Tensor, bs: Sequence[Tensor], offsets: Sequence[int], out: Tensor) -> None:
    """Adds one adapter to all rows, in place.

    Args:
        x: [T, in].
        a: [targets, rank, in].
        bs: per target [rank, out_t].
        offsets: per target its first column in ``out``.
        out: [T, all outputs], updated in place.
    """
    if len(bs) == 1:
        out.addmm_(F.linear(x, a[0]), bs[0])
        return
    down = F.linear(x, a.flatten(0, 1))
    rank = a.shape[1]
    for index, (b, offset) in enumerate(zip(bs, offsets, strict=True)):
        out[:, offset : offset + b.shape[1]].addmm_(down[:, index * rank : (index + 1) * rank], b)


def add_lora_mixed(
    x: Tensor, a: Tensor, bs: Sequence[Tensor], offsets: Sequence[int], rows: Tensor, out: Tensor
) -> None:
    """Adds to each row its own adapter, in place: every row through all the adapters, the others' share masked out.
    Two dense products a target and no waiting for the device; the A side is small beside the base weights.

    Args:
        x: [T, in].
        a: [slots, targets, rank, in].
        bs: per target [slots, rank, out_t].
        offsets: per target its first column in ``out``.
        rows: [T, slots] in x's dtype: 1 where the row uses the slot, else 0.
        out: [T, all outputs], updated in place.
    """
    slots, targets, rank, _ = a.shape
    down = F.linear(x, a.flatten(0, 2)).view(-1, slots, targets, rank) * rows[:, :, None, None]
    for index, (b, offset) in enumerate(zip(bs, offsets, strict=True)):
        share = down[:, :, index].reshape(-1, slots * rank)
        out[:, offset : offset + b.shape[2]].addmm_(share, b.flatten(0, 1))


def slot_rows(row_slots: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, len(slots)] mask of which row uses which slot, for add_lora_mixed()."""
    return (row_slots[:, None] == slots[None, :]).to(dtype)
