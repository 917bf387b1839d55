"""Adapters that a step uses, row by row, as device buffers. Needs no Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


def active_slots(adapters: Iterable[int], capacity: int) -> list[int]:
    """LoraRows.active on the host: [1 + capacity] integers.

    Raises:
        ValueError: more distinct slots than the capacity.
    """
    distinct = sorted(set(adapters) - {0})
    if len(distinct) > capacity:
        raise ValueError(f"{len(distinct)} adapters in one step, the capacity is {capacity}")
    return [len(distinct), *distinct, *[0] * (capacity - len(distinct))]


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The adapters of one group of linear layers in one step: fixed storage and which row uses which slot.

    All tensors are contiguous and keep their addresses for the life of the engine.
    """

    a: Tensor
    """[slots, targets, max_rank, K]: A of every slot; K is the group's input width."""
    b: Tensor
    """[slots, max_rank, N]: Bᵀ times the adapter's scale, the columns of all targets side by side as in the group's
    fused output."""
    ends: tuple[int, ...]
    """Ends of the targets' columns, ascending; the last is N. Up to 4 targets."""
    ranks: Tensor
    """[slots] int32: the largest rank of the slot's adapter; rows of a beyond it are not read, rows of b are zeros."""
    row_adapters: Tensor
    """[T] int32: slot of each row, 0 for none."""
    active: Tensor
    """[1 + capacity] int32: how many slots follow, then the distinct slots of row_adapters without 0, in any order."""
    invariant: bool = False
    """Cut the work alike for any number of rows: a row's bits then do not depend on how many there are."""

    def __post_init__(self) -> None:
        slots, targets, rank, _ = self.a.shape
        if self.b.shape[:2] != (slots, rank) or self.ranks.shape != (slots,):
            raise ValueError(f"b is {list(self.b.shape)}, ranks {list(self.ranks.shape)} beside a {list(self.a.shape)}")
        if len(self.ends) != targets or targets > 4 or self.ends[-1] != self.b.shape[2]:
            raise ValueError(f"ends {self.ends} do not fit {targets} targets (at most 4) of {self.b.shape[2]} columns")

    @property
    def capacity(self) -> int:
        """Most slots that one step can use."""
        return self.active.shape[0] - 1
