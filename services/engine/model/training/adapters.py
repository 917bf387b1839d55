"""An adapter inside a training step on the GPU: its factors in the model's dtype, and its gradients.

``y += s · (x Aᵀ) Bᵀ`` for each linear layer (Hu et al., LoRA, arXiv 2106.09685). Layers that share an input share one
product with all their A. As in serving the scale s is part of the rounded B, so that both see the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.config import ModelConfig
from services.engine.model.loader import query_row_order
from services.engine.model.lora_params import LoraParams
from services.engine.model.lora_targets import layer_groups

_QUERY = "self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Part:
    """One linear layer of a group."""

    columns: slice
    """Of the group's fused output."""
    ranks: slice
    """Of the group's low-rank rows."""
    b: Tensor
    """[out, rank] model dtype, scaled; rows in the order of the fused output."""
    b_grad: Tensor
    """[out, rank] float32: where the gradient goes, in the master's order and not scaled yet."""
    order: Tensor | None
    """[out] int64: the master's row of each row of ``b``; None: the same."""


@dataclass(frozen=True, slots=True)
class GroupAdapter:
    """The adapter of linear layers that read one input."""

    a: Tensor
    """[R, in] model dtype: the A of all parts."""
    a_grad: Tensor
    """[R, in] float32."""
    parts: tuple[Part, ...]

    def reduce(self, x: Tensor) -> Tensor:
        """[T, in] to [T, R]."""
        return torch.mm(x, self.a.t())

    def add(self, hidden: Tensor, out: Tensor) -> None:
        """Adds what reduce() leads to onto the fused output [T, out], in place."""
        for part in self.parts:
            out[:, part.columns].addmm_(hidden[:, part.ranks], part.b.t())

    def back(self, grad: Tensor) -> Tensor:
        """Gradient in reduce()'s result, [T, R], of that in the fused output."""
        result = torch.empty(len(grad), len(self.a), dtype=grad.dtype, device=grad.device)
        for part in self.parts:
            torch.mm(grad[:, part.columns], part.b, out=result[:, part.ranks])
        return result

    def add_input_grad(self, hidden_grad: Tensor, grad: Tensor) -> None:
        """Adds back()'s result onto the gradient in the input [T, in], in place."""
        grad.addmm_(hidden_grad, self.a)

    def gradients(self, x: Tensor, hidden: Tensor, hidden_grad: Tensor, grad: Tensor) -> None:
        """Writes the gradients of both factors.

        Args:
            x: [T, in], the input.
            hidden: [T, R], of reduce().
            hidden_grad: [T, R], of back().
            grad: [T, out], in the fused output.
        """
        product32(hidden_grad.t(), x, self.a_grad)
        for part in self.parts:
            if part.order is None:
                product32(grad[:, part.columns].t(), hidden[:, part.ranks], part.b_grad)
            else:
                found = torch.empty_like(part.b_grad)
                product32(grad[:, part.columns].t(), hidden[:, part.ranks], found)
                part.b_grad.index_copy_(0, part.order, found)


def product32(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b`` in float32, whatever the factors are."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:  # torch's products on the CPU give the factors' dtype
        torch.mm(a.float(), b.float(), out=out)


class WorkingAdapter:
    """What a forward and its backward need of an adapter.

    Args:
        lora: the masters, on the model's device.
        dtype: the model's.
    """

    def __init__(self, lora: LoraParams, config: ModelConfig, dtype: torch.dtype) -> None:
        self._lora = lora
        self._scales = [(target.b.shape, target.scale) for target in lora.targets.values()]
        self._one_scale = {scale for _, scale in self._scales}
        a, b = lora.flat_a.detach().to(dtype), self._scaled(lora.flat_b.detach().clone()).to(dtype)
        self._a_grad, self._b_grad = torch.empty_like(lora.flat_a), torch.empty_like(lora.flat_b)
        views = {
            path: (slices, target)
            for path, slices, target in zip(lora.targets, lora.slices(), lora.targets.values(), strict=True)
        }
        self._layers: list[dict[str, GroupAdapter]] = []
        for layer in range(config.num_layers):
            groups: dict[str, GroupAdapter] = {}
            for group in layer_groups(config, layer):
                parts: list[Part] = []
                first: int | None = None
                end = rank = 0
                for member in group.targets:
                    if (found := views.get(f"layers.{layer}.{member.module}")) is None:
                        continue
                    (of_a, of_b), target = found
                    first = of_a.start if first is None else first
                    end = of_a.stop
                    order = query_row_order(config).to(b.device) if member.module == _QUERY else None
                    rows = b[of_b].view_as(target.b)
                    parts.append(
                        Part(
                            columns=slice(member.offset, member.offset + member.out_features),
                            ranks=slice(rank, rank + target.a.shape[0]),
                            b=rows if order is None else rows.index_select(0, order),
                            b_grad=self._b_grad[of_b].view_as(target.b),
                            order=order,
                        )
                    )
                    rank += target.a.shape[0]
                if first is not None:
                    shape = (rank, group.in_features)
                    groups[group.name] = GroupAdapter(
                        a[first:end].view(shape), self._a_grad[first:end].view(shape), tuple(parts)
                    )
            self._layers.append(groups)

    def layer(self, index: int) -> dict[str, GroupAdapter]:
        """The adapted groups of a layer, by name."""
        return self._layers[index]

    def gradients(self) -> Iterator[Tensor]:
        """Of the masters, in the order of LoraParams.parameters(), after a backward has written them all."""
        self._scaled(self._b_grad)
        for (of_a, of_b), target in zip(self._lora.slices(), self._lora.targets.values(), strict=True):
            yield self._a_grad[of_a].view_as(target.a)
            yield self._b_grad[of_b].view_as(target.b)

    def _scaled(self, flat: Tensor) -> Tensor:
        """Values in the layout of flat_b, each target's times its scale, in place."""
        if len(self._one_scale) == 1:
            return flat.mul_(next(iter(self._one_scale)))
        begin = 0
        for shape, scale in self._scales:
            flat[begin : begin + shape.numel()].mul_(scale)
            begin += shape.numel()
        return flat
