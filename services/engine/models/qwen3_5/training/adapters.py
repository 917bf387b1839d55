"""An adapter inside a training step on the GPU: its factors in the model's dtype, and its gradients. What several
adapters in one step need is in `adapter_batch`.

``y += s · (x Aᵀ) Bᵀ`` for each linear layer (Hu et al., LoRA, arXiv 2106.09685). Layers that share an input share one
product with all their A. As in serving the scale s is part of the rounded B, so that both see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.engine.models.lora.targets import Group, layer_groups
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.loading.loader import query_row_order

_QUERY = "self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Part:
    """Adapter of one linear layer of a group."""

    columns: slice
    """Columns of the part in the group's fused output."""
    ranks: slice
    """Slice of the group's low-rank rows."""
    b: Tensor
    """[out, rank] model dtype, scaled; rows in the order of the fused output."""
    b_grad: Tensor
    """[out, rank] float32, in the master's order: the gradient is added to it."""
    scale: float
    order: Tensor | None
    """[out] int64: the master's row of each row of ``b``; None: the same."""


class GroupProducts(Protocol):
    """Products of what adapts linear layers that read one input."""

    def reduce(self, x: Tensor) -> Tensor:
        """[T, in] to [T, R]."""
        ...

    def expand(self, hidden: Tensor) -> Tensor:
        """[T, R] of reduce() to what it adds to the fused output, [T, out].

        Made first, for the base's product to be added to it: so only this small part is rounded by itself, and the sum
        once. The other way round the sum would be rounded twice, an error as large as that of the whole layer.
        """
        ...

    def back(self, grad: Tensor) -> Tensor:
        """Gradient in reduce()'s result, [T, R], of that in the fused output."""
        ...

    def input_grad(self, hidden_grad: Tensor) -> Tensor:
        """back()'s result to its part of the gradient in the input, [T, in]."""
        ...

    def gradients(self, x: Tensor, hidden: Tensor, hidden_grad: Tensor, grad: Tensor) -> None:
        """Adds to the gradients of both factors.

        Args:
            x: [T, in], the input.
            hidden: [T, R], of reduce().
            hidden_grad: [T, R], of back().
            grad: [T, out], in the fused output.
        """
        ...


class WorkingFactors(Protocol):
    """What a step's layers read of adapters, and add gradients to."""

    def layer(self, index: int) -> Mapping[str, GroupProducts]:
        """The adapted groups of a layer, by name."""
        ...


@dataclass(frozen=True, slots=True)
class GroupAdapter:
    """The adapter of linear layers that read one input. Implements GroupProducts."""

    a: Tensor
    """[R, in] model dtype: the A of all parts."""
    a_grad: Tensor
    """[R, in] float32: the gradient is added to it."""
    parts: tuple[Part, ...]
    width: int
    """Width of the group's fused output."""

    @property
    def covers(self) -> bool:
        """Whether every linear layer of the group has a part."""
        return bool(sum(part.columns.stop - part.columns.start for part in self.parts) == self.width)

    def reduce(self, x: Tensor) -> Tensor:
        """See GroupProducts."""
        return torch.mm(x, self.a.t())

    def expand(self, hidden: Tensor) -> Tensor:
        """See GroupProducts."""
        make = torch.empty if self.covers else torch.zeros
        out = make(len(hidden), self.width, dtype=hidden.dtype, device=hidden.device)
        for part in self.parts:
            torch.mm(hidden[:, part.ranks], part.b.t(), out=out[:, part.columns])
        return out

    def back(self, grad: Tensor) -> Tensor:
        """See GroupProducts."""
        result = torch.empty(len(grad), len(self.a), dtype=grad.dtype, device=grad.device)
        for part in self.parts:
            torch.mm(grad[:, part.columns], part.b, out=result[:, part.ranks])
        return result

    def input_grad(self, hidden_grad: Tensor) -> Tensor:
        """See GroupProducts."""
        return torch.mm(hidden_grad, self.a)

    def gradients(self, x: Tensor, hidden: Tensor, hidden_grad: Tensor, grad: Tensor) -> None:
        """See GroupProducts."""
        add_product(self.a_grad, hidden_grad.t(), x)
        for part in self.parts:
            ranks = hidden[:, part.ranks]
            if part.order is None:
                add_product(part.b_grad, grad[:, part.columns].t(), ranks, part.scale)
            else:
                found = torch.zeros_like(part.b_grad)
                add_product(found, grad[:, part.columns].t(), ranks, part.scale)
                part.b_grad.index_add_(0, part.order, found)


def add_product(onto: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """``onto += scale · a @ b``, onto in float32, whatever the factors are."""
    if a.dtype == torch.float32:
        onto.addmm_(a, b, alpha=scale)
    elif a.is_cuda:
        torch.addmm(onto, a, b, out_dtype=torch.float32, alpha=scale, out=onto)
    else:  # torch's products on the CPU give the factors' dtype
        onto.addmm_(a.float(), b.float(), alpha=scale)


class WorkingAdapter:
    """Tensors of an adapter that a forward and its backward read. Their addresses stay the same, for captured CUDA
    graphs. Implements WorkingFactors.

    Args:
        lora: the masters, on the model's device; their gradients are linked (LoraParams.link_gradients).
        dtype: the model's.
    """

    def __init__(self, lora: LoraParams, config: Qwen3_5Config, dtype: torch.dtype) -> None:
        lora.link_gradients()
        self._lora = lora
        self._places = (gradient(lora.flat_a).data_ptr(), gradient(lora.flat_b).data_ptr())
        self._a = torch.empty_like(lora.flat_a, dtype=dtype)
        self._b = torch.empty_like(lora.flat_b, dtype=dtype)
        self._layers = group_adapters(lora, self._a, self._b, config)
        self.refresh()

    def refresh(self) -> None:
        """Takes the masters as they are now."""
        take_masters(self._lora, self._a, self._b)
        reorder(self._layers, lambda b: b)

    def in_place(self) -> bool:
        """True if the masters' gradients still lie where these products add to them."""
        self._lora.link_gradients()
        return (gradient(self._lora.flat_a).data_ptr(), gradient(self._lora.flat_b).data_ptr()) == self._places

    def layer(self, index: int) -> dict[str, GroupAdapter]:
        """See WorkingFactors."""
        return self._layers[index]


def take_masters(lora: LoraParams, a: Tensor, b: Tensor) -> None:
    """Writes an adapter's masters, B times its scale, into flat tensors of the model's dtype."""
    a.copy_(lora.flat_a.detach())
    scales = {target.scale for target in lora.targets.values()}
    if len(scales) == 1:
        torch.mul(lora.flat_b.detach(), scales.pop(), out=b)
        return
    for (_, place), target in zip(lora.slices(), lora.targets.values(), strict=True):
        torch.mul(lora.flat_b.detach()[place], target.scale, out=b[place])


def reorder(layers: Sequence[Mapping[str, GroupAdapter]], view: Callable[[Tensor], Tensor]) -> None:
    """Puts B's rows, as the masters have them, into the order of the fused output, where that is another one.

    Args:
        view: of a part's ``b``, what is to be reordered: [..., out, rank].
    """
    for layer in layers:
        for group in layer.values():
            for part in group.parts:
                if part.order is not None:
                    rows = view(part.b)
                    rows.copy_(rows.index_select(-2, part.order))


def group_adapters(lora: LoraParams, a: Tensor, b: Tensor, config: Qwen3_5Config) -> list[dict[str, GroupAdapter]]:
    """The adapted groups of each layer, by name.

    Args:
        a, b: flat tensors in the model's dtype, laid out as the masters.
    """
    places = dict(zip(lora.targets, lora.slices(), strict=True))
    order = query_row_order(config).to(b.device)
    return [
        {
            group.name: adapter
            for group in layer_groups(config, layer)
            if (adapter := _group(lora, a, b, layer, group, places, order)) is not None
        }
        for layer in range(config.num_layers)
    ]


def _group(
    lora: LoraParams,
    flat_a: Tensor,
    flat_b: Tensor,
    layer: int,
    group: Group,
    places: Mapping[str, tuple[slice, slice]],
    order: Tensor,
) -> GroupAdapter | None:
    """The adapter of a group, None if none of its linear layers has one."""
    parts: list[Part] = []
    members: list[slice] = []
    rank = 0
    for member in group.targets:
        path = f"layers.{layer}.{member.module}"
        if (target := lora.targets.get(path)) is None:
            continue
        of_a, of_b = places[path]
        members.append(of_a)
        parts.append(
            Part(
                columns=slice(member.offset, member.offset + member.out_features),
                ranks=slice(rank, rank + target.a.shape[0]),
                b=flat_b[of_b].view_as(target.b),
                b_grad=gradient(lora.flat_b)[of_b].view_as(target.b),
                scale=target.scale,
                order=order if member.module == _QUERY else None,
            )
        )
        rank += target.a.shape[0]
    if not parts:
        return None
    place, shape = slice(members[0].start, members[-1].stop), (rank, group.in_features)
    a, a_grad = flat_a[place].view(shape), gradient(lora.flat_a)[place].view(shape)
    return GroupAdapter(a, a_grad, tuple(parts), group.out_features)


def gradient(flat: Tensor) -> Tensor:
    """The gradient of an adapter's flat tensor. Raises ValueError if it is not linked."""
    if flat.grad is None:
        raise ValueError("the adapter's gradients are not linked")
    return flat.grad
