"""The adapter's part of a training step's products."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.models.qwen3_5.training.adapters import GroupAdapter, Part

_TOKENS, _IN, _WIDTHS, _RANK = 192, 256, (96, 160), 8


def _adapter(dtype: torch.dtype, parts: tuple[int, ...]) -> GroupAdapter:
    """With every part named, or only some of them."""
    made, column, rank = [], 0, 0
    for index, width in enumerate(_WIDTHS):
        if index in parts:
            b = (0.05 * torch.randn(width, _RANK)).to(dtype)
            made.append(
                Part(slice(column, column + width), slice(rank, rank + _RANK), b, torch.zeros(b.shape), 1.0, None)
            )
            rank += _RANK
        column += width
    a = (torch.randn(rank, _IN) * _IN**-0.5).to(dtype)
    return GroupAdapter(a, torch.zeros(a.shape), tuple(made), column)


def _exact(adapter: GroupAdapter, x: Tensor, weight: Tensor) -> Tensor:
    out = x.double() @ weight.double().t()
    reduced = x.double() @ adapter.a.double().t()
    for part in adapter.parts:
        out[:, part.columns] += reduced[:, part.ranks] @ part.b.double().t()
    return out


def _rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def test_the_sum_is_rounded_once() -> None:
    """Rounding the base's product and then the sum would make the error larger by half."""
    torch.manual_seed(0)
    adapter = _adapter(torch.bfloat16, (0, 1))
    x = torch.randn(_TOKENS, _IN).bfloat16()
    weight = (torch.randn(sum(_WIDTHS), _IN) * _IN**-0.5).bfloat16()
    exact = _exact(adapter, x, weight)
    out = adapter.expand(adapter.reduce(x)).addmm_(x, weight.t())
    assert _rms(out - exact) < 1.1 * _rms(exact.bfloat16() - exact)

    grad = torch.randn(_TOKENS, sum(_WIDTHS)).bfloat16()
    reduced = adapter.back(grad)
    back = adapter.input_grad(reduced).addmm_(grad, weight)
    wanted = grad.double() @ weight.double() + reduced.double() @ adapter.a.double()
    assert _rms(back - wanted) < 1.1 * _rms(wanted.bfloat16() - wanted)


def test_linear_layers_without_an_adapter_get_nothing() -> None:
    torch.manual_seed(0)
    for parts in ((0,), (1,)):
        adapter = _adapter(torch.float32, parts)
        added = adapter.expand(adapter.reduce(torch.randn(_TOKENS, _IN)))
        (part,) = adapter.parts
        assert added[:, part.columns].abs().min() > 0
        added[:, part.columns] = 0
        assert not added.any()
