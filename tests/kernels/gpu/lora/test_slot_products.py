"""Products of several jobs' adapters against those of each job alone, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.lora.slot_products import Slots, slot_gradient, slot_product
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.train.support import relative

ROWS = [3, 70, 0, 33, 1]
BARS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def nothing(device: torch.device, count: int = len(ROWS)) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(1, device=device), torch.zeros(1, device=device)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 300), (24, 40), (200, 3), (130, 70)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_meet_the_matrix_of_their_slot(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, transposed: bool
) -> None:
    slots = Slots.build(ROWS, nothing(device), device)
    count, total = len(ROWS), sum(ROWS)
    x = normal(total, inputs + 5, seed=0, device=device, dtype=dtype)[:, 5:]
    shape = (count, inputs, outputs) if transposed else (count, outputs, inputs)
    weights = normal(*shape, seed=1, device=device, dtype=dtype)
    weights = weights.transpose(1, 2) if transposed else weights
    wide = torch.full((total + 2, outputs + 7), 7.0, dtype=dtype, device=device)
    slot_product(x, slots, weights, wide[:total, 3 : 3 + outputs])
    found = wide[:total, 3 : 3 + outputs]
    pairs = zip(torch.split(x.double(), ROWS), weights.double(), strict=True)
    assert relative(found, torch.cat([part @ weight.t() for part, weight in pairs])) <= BARS[dtype]
    wide[:total, 3 : 3 + outputs] = 7.0
    assert bool((wide == 7.0).all()), "nothing beside the outputs is touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("height", "width"), [(3, 200), (140, 8), (70, 80)])
@pytest.mark.parametrize("ordered", [False, True])
def test_gradients_are_those_of_the_slots_own_rows(
    device: torch.device, dtype: torch.dtype, height: int, width: int, ordered: bool
) -> None:
    total, offset = sum(ROWS), 9
    left = normal(total, height + 2, seed=0, device=device, dtype=dtype)[:, :height]
    right = normal(total, width, seed=1, device=device, dtype=dtype)
    before = [normal(offset + height * width + 4, seed=2 + one, device=device, dtype=torch.float32) for one in range(5)]
    after = [one.clone() for one in before]
    unused = [one for one, _ in nothing(device)]
    order = torch.randperm(height, generator=torch.Generator().manual_seed(3)).to(device) if ordered else None
    slots = Slots.build(ROWS, list(zip(unused, after, strict=True)), device)
    slot_gradient(left, right, slots, 1, offset, scale=0.5, order=order)
    parts = zip(torch.split(left.double(), ROWS), torch.split(right.double(), ROWS), before, after, strict=True)
    for a, b, was, found in parts:
        matrix = slice(offset, offset + height * width)
        product = torch.zeros(height, width, dtype=torch.float64, device=device)
        product[torch.arange(height, device=device) if order is None else order] = 0.5 * a.t() @ b
        exact = was.double().clone()
        exact[matrix] += product.flatten()
        assert relative(found, exact) <= 2e-6
        outside = torch.ones(len(was), dtype=torch.bool, device=device)
        outside[matrix] = False
        assert torch.equal(found[outside], was[outside])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_stays_in_its_slot(device: torch.device) -> None:
    dtype, rows = torch.float32, [5, 6, 7]
    gradients = [(torch.zeros(8 * 12, device=device), torch.zeros(1, device=device)) for _ in rows]
    slots = Slots.build(rows, gradients, device)
    x, h = (normal(18, width, seed=width, device=device, dtype=dtype) for width in (12, 8))
    x[5:11], h[5:11] = float("nan"), float("inf")
    out = torch.empty(18, 20, device=device)
    slot_product(x, slots, normal(3, 20, 12, seed=0, device=device, dtype=dtype), out)
    slot_gradient(h, x, slots, 0, 0)
    bad = [False, True, False]
    assert [not bool(part.isfinite().all()) for part in torch.split(out, rows)] == bad
    assert [not bool(a.isfinite().all()) for a, _ in gradients] == bad


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    slots = Slots.build([2, 3], nothing(device, 2), device)
    x = torch.zeros(5, 4, device=device)
    with pytest.raises(ValueError, match="slot_product"):
        slot_product(x, slots, torch.zeros(2, 3, 5, device=device), torch.zeros(5, 3, device=device))
    with pytest.raises(ValueError, match="slot_gradient"):
        slot_gradient(x, torch.zeros(4, 2, device=device), slots, 0, 0)
    with pytest.raises(ValueError, match="2 slots with 1"):
        Slots.build([2, 3], nothing(device, 1), device)
    with pytest.raises(ValueError, match="float32"):
        Slots.build([2], [(torch.zeros(1).half(), torch.zeros(1))], device)
