"""Adapters of several jobs inside one training step on the GPU, each on rows of its own.

As `adapters` does it for one: the same roundings, in kernels that look up a row's adapter. The factors of all adapters
lie behind one another, so what is a product for one adapter is one launch for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.lora.slot_products import Slots, slot_gradient, slot_product
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.training.adapters import (
    GroupAdapter,
    gradient,
    group_adapters,
    reorder,
    take_masters,
)


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """The adapters of linear layers that read one input. Implements GroupProducts."""

    first: GroupAdapter
    """That of the first slot: where every slot has the same."""
    stacked_a: Tensor
    """[slots, numbers of A]: the first slot's factors are views of its first row."""
    stacked_b: Tensor
    """[slots, numbers of B]."""
    slots: Slots

    def reduce(self, x: Tensor) -> Tensor:
        """See GroupProducts."""
        return self._product(x, _of_slots(self.stacked_a, self.first.a), len(self.first.a))

    def expand(self, hidden: Tensor) -> Tensor:
        """See GroupProducts."""
        make = torch.empty if self.first.covers else torch.zeros
        out = make(len(hidden), self.first.width, dtype=hidden.dtype, device=hidden.device)
        for part in self.first.parts:
            slot_product(hidden[:, part.ranks], self.slots, _of_slots(self.stacked_b, part.b), out[:, part.columns])
        return out

    def back(self, grad: Tensor) -> Tensor:
        """See GroupProducts."""
        result = torch.empty(len(grad), len(self.first.a), dtype=grad.dtype, device=grad.device)
        for part in self.first.parts:
            factors = _of_slots(self.stacked_b, part.b).transpose(1, 2)
            slot_product(grad[:, part.columns], self.slots, factors, result[:, part.ranks])
        return result

    def input_grad(self, hidden_grad: Tensor) -> Tensor:
        """See GroupProducts."""
        factors = _of_slots(self.stacked_a, self.first.a).transpose(1, 2)
        return self._product(hidden_grad, factors, self.first.a.shape[1])

    def gradients(self, x: Tensor, hidden: Tensor, hidden_grad: Tensor, grad: Tensor) -> None:
        """See GroupProducts."""
        slot_gradient(hidden_grad, x, self.slots, 0, int(self.first.a.storage_offset()))
        for part in self.first.parts:
            slot_gradient(
                grad[:, part.columns],
                hidden[:, part.ranks],
                self.slots,
                1,
                int(part.b.storage_offset()),
                scale=part.scale,
                order=part.order,
            )

    def _product(self, x: Tensor, factors: Tensor, width: int) -> Tensor:
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        slot_product(x, self.slots, factors, out)
        return out


def _of_slots(stacked: Tensor, first: Tensor) -> Tensor:
    """The matrix ``first``, a view of the first row of ``stacked``, and those at its place in all other rows."""
    strides = (stacked.stride(0), *first.stride())
    return stacked.as_strided((len(stacked), *first.shape), strides, first.storage_offset())


class WorkingBatch:
    """Tensors of several adapters that a forward and its backward read. Implements WorkingFactors.

    Args:
        lora: the masters, on the model's device.
        rows: of each adapter, in order.
        dtype: the model's.
    """

    def __init__(self, lora: LoraBatch, rows: Sequence[int], config: Qwen3_5Config, dtype: torch.dtype) -> None:
        for adapter in lora.adapters:
            adapter.link_gradients()
        first, count = lora.adapters[0], len(lora.adapters)
        device = first.flat_a.device
        a = torch.empty(count, first.flat_a.numel(), dtype=dtype, device=device)
        b = torch.empty(count, first.flat_b.numel(), dtype=dtype, device=device)
        for adapter, own_a, own_b in zip(lora.adapters, a, b, strict=True):
            take_masters(adapter, own_a, own_b)
        groups = group_adapters(first, a[0], b[0], config)
        reorder(groups, lambda part: _of_slots(b, part))
        gradients = [(gradient(adapter.flat_a), gradient(adapter.flat_b)) for adapter in lora.adapters]
        slots = Slots.build(rows, gradients, device)
        self._layers = [{name: GroupBatch(group, a, b, slots) for name, group in layer.items()} for layer in groups]

    def layer(self, index: int) -> dict[str, GroupBatch]:
        """See WorkingFactors."""
        return self._layers[index]
