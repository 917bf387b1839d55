"""Adapters of mixed batches, and log-probabilities in tiles, against plain computations in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import add_lora, add_lora_mixed, slot_rows
from kernels.token_logprobs import TILE, token_logprobs


def test_each_row_gets_its_own_adapter() -> None:
    torch.manual_seed(0)
    x, a = torch.randn(7, 6), torch.randn(4, 2, 3, 6)
    bs = (torch.randn(4, 3, 5), torch.randn(4, 3, 8))
    row_slots = torch.tensor([0, 3, 1, 1, 0, 2, 3])
    base = torch.randn(7, 20)
    expected = base.double()
    for row, slot in enumerate(row_slots.tolist()):
        if slot:
            for target, (b, offset) in enumerate(zip(bs, (0, 7), strict=True)):
                delta = b[slot].t().double() @ (a[slot, target].double() @ x[row].double())
                expected[row, offset : offset + len(delta)] += delta
    slots = torch.tensor([1, 2, 3])
    mixed = base.clone()
    add_lora_mixed(x, a[slots], [b[slots] for b in bs], (0, 7), slot_rows(row_slots, slots, x.dtype), mixed)
    torch.testing.assert_close(mixed.double(), expected, atol=1e-4, rtol=1e-5)
    for slot in (1, 2, 3):
        rows = row_slots == slot
        only = base[rows].clone()
        add_lora(x[rows], a[slot], [b[slot] for b in bs], (0, 7), only)
        torch.testing.assert_close(only.double(), expected[rows], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, TILE, TILE + 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_logprobs(rows: int, temperature: float) -> None:
    torch.manual_seed(rows)
    hidden, head = torch.randn(rows, 8, requires_grad=True), torch.randn(50, 8)
    targets, weight = torch.randint(0, 50, (rows,)), torch.randn(rows)
    out = token_logprobs(hidden, head, targets, temperature)
    exact = hidden.detach().double().requires_grad_()
    expected = torch.log_softmax(exact @ head.double().t() / temperature, -1)[torch.arange(rows), targets]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=1e-4, rtol=1e-4)


def test_temperature_must_be_positive() -> None:
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            token_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), temperature)
