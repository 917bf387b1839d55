"""An adapter inside a training step on the GPU: its factors in the model's dtype, and its gradients.

``y += s · (x Aᵀ) Bᵀ`` for each linear layer (Hu et al., LoRA, arXiv 2106.09685). Layers that share an input share one
product with all their A. As in serving the scale s is part of the rounded B, so that both see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class GroupAdapter:
    """The adapter of linear layers that read one input."""

    a: Tensor
    """[R, in] model dtype: the A of all parts."""
    a_grad: Tensor
    """[R, in] float32: the gradient is added to it."""
    parts: tuple[Part, ...]
    width: int
    """Width of the group's fused output."""

    def reduce(self, x: Tensor) -> Tensor:
        """[T, in] to [T, R]."""
        return torch.mm(x, self.a.t())

    def expand(self, hidden: Tensor) -> Tensor:
        """[T, R] of reduce() to what it adds to the fused output, [T, out].

        Made first, for the base's product to be added to it: so only this small part is rounded by itself, and the sum
        once. The other way round the sum would be rounded twice, an error as large as that of the whole layer.
        """
        covered = sum(part.columns.stop - part.columns.start for part in self.parts) == self.width
        make = torch.empty if covered else torch.zeros
        out = make(len(hidden), self.width, dtype=hidden.dtype, device=hidden.device)
        for part in self.parts:
            torch.mm(hidden[:, part.ranks], part.b.t(), out=out[:, part.columns])
        return out

    def back(self, grad: Tensor) -> Tensor:
        """Gradient in reduce()'s result, [T, R], of that in the fused output."""
        result = torch.empty(len(grad), len(self.a), dtype=grad.dtype, device=grad.device)
        for part in self.parts:
            torch.mm(grad[:, part.columns], part.b, out=result[:, part.ranks])
        return result

    def input_grad(self, hidden_grad: Tensor) -> Tensor:
        """back()'s result to its part of the gradient in the input, [T, in]."""
        return torch.mm(hidden_grad, self.a)

    def gradients(self, x: Tensor, hidden: Tensor, hidden_grad: Tensor, grad: Tensor) -> None:
        """Adds to the gradients of both factors.

        Args:
            x: [T, in], the input.
            hidden: [T, R], of reduce().
            hidden_grad: [T, R], of back().
            grad: [T, out], in the fused output.
        """
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
    graphs.

    Args:
        lora: the masters, on the model's device; their gradients are linked (LoraParams.link_gradients).
        dtype: the model's.
    """

    def __init__(self, lora: LoraParams, config: Qwen3_5Config, dtype: torch.dtype) -> None:
        lora.link_gradients()
        self._lora = lora
        self._places = (_gradient(lora.flat_a).data_ptr(), _gradient(lora.flat_b).data_ptr())
        self._a = torch.empty_like(lora.flat_a, dtype=dtype)
        self._b = torch.empty_like(lora.flat_b, dtype=dtype)
        self._reordered: list[tuple[Tensor, Tensor, Tensor]] = []
        """For each q_proj: B, its rows in the fused order, and that order."""
        self._layers = [
            {
                group.name: adapter
                for group in layer_groups(config, layer)
                if (adapter := self._group(layer, group, config)) is not None
            }
            for layer in range(config.num_layers)
        ]
        self.refresh()

    def refresh(self) -> None:
        """Takes the masters as they are now."""
        self._a.copy_(self._lora.flat_a.detach())
        scales = {target.scale for target in self._lora.targets.values()}
        if len(scales) == 1:
            torch.mul(self._lora.flat_b.detach(), scales.pop(), out=self._b)
        else:
            for (_, place), target in zip(self._lora.slices(), self._lora.targets.values(), strict=True):
                torch.mul(self._lora.flat_b.detach()[place], target.scale, out=self._b[place])
        for plain, fused, order in self._reordered:
            torch.index_select(plain, 0, order, out=fused)

    def in_place(self) -> bool:
        """True if the masters' gradients still lie where these products add to them."""
        self._lora.link_gradients()
        return (_gradient(self._lora.flat_a).data_ptr(), _gradient(self._lora.flat_b).data_ptr()) == self._places

    def layer(self, index: int) -> dict[str, GroupAdapter]:
        """The adapted groups of a layer, by name."""
        return self._layers[index]

    def _group(self, layer: int, group: Group, config: Qwen3_5Config) -> GroupAdapter | None:
        """The adapter of a group, None if none of its linear layers has one."""
        lora = self._lora
        places = dict(zip(lora.targets, lora.slices(), strict=True))
        parts: list[Part] = []
        members: list[slice] = []
        rank = 0
        for member in group.targets:
            path = f"layers.{layer}.{member.module}"
            if (target := lora.targets.get(path)) is None:
                continue
            of_a, of_b = places[path]
            members.append(of_a)
            b, order = self._b[of_b].view_as(target.b), None
            if member.module == _QUERY:
                order = query_row_order(config).to(b.device)
                self._reordered.append((b, torch.empty_like(b), order))
                b = self._reordered[-1][1]
            parts.append(
                Part(
                    columns=slice(member.offset, member.offset + member.out_features),
                    ranks=slice(rank, rank + target.a.shape[0]),
                    b=b,
                    b_grad=_gradient(lora.flat_b)[of_b].view_as(target.b),
                    scale=target.scale,
                    order=order,
                )
            )
            rank += target.a.shape[0]
        if not parts:
            return None
        place, shape = slice(members[0].start, members[-1].stop), (rank, group.in_features)
        a, a_grad = self._a[place].view(shape), _gradient(lora.flat_a)[place].view(shape)
        return GroupAdapter(a, a_grad, tuple(parts), group.out_features)


def _gradient(flat: Tensor) -> Tensor:
    if flat.grad is None:
        raise ValueError("the adapter's gradients are not linked")
    return flat.grad
