"""What a product takes of x, made in one launch, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.linear.preparation import Rows, prepare
from kernels.gpu.lora.rows import LoraRows, active_slots
from kernels.gpu.lora.shrink import ShrinkConfig
from kernels.quantize import unpair
from tests.kernels.gpu import interpreter  # noqa: F401

ROWS = ShrinkConfig(1, 2, 256, 1, 4, 1)
SLOTS = ShrinkConfig(16, 16, 64, 2, 4, 2)
GATHERED = ShrinkConfig(8, 16, 128, 2, 4, gathered=True)
FORMS: list[Rows] = ["as they are", "weighted", "float8"]


def adapters(device: torch.device, slots: list[int]) -> LoraRows:
    ints = {"dtype": torch.int32, "device": device}
    return LoraRows(
        torch.randn(4, 2, 16, 256, device=device) / 16,
        torch.zeros(4, 16, 8, device=device),
        (4, 8),
        torch.tensor([0, 16, 5, 11], **ints),
        torch.tensor(slots, **ints),
        torch.tensor(active_slots(slots, 3), **ints),
    )


@pytest.mark.parametrize("config", [ROWS, SLOTS, GATHERED])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normed", [False, True])
def test_rows_and_adapters_in_one_launch(device: torch.device, config: ShrinkConfig, form: Rows, normed: bool) -> None:
    torch.manual_seed(6)
    x, gain = torch.randn(6, 256, device=device), torch.rand(256, device=device) + 0.5 if normed else None
    slots = [2, 0, 3, 1, 1, 2]
    lora = adapters(device, slots)
    if form == "weighted" and gain is None:
        with pytest.raises(ValueError, match="prepare"):
            prepare(x, gain, rows=form)
        return
    made = prepare(x, gain, rows=form, lora=lora, config=config)
    weighted = x.double() if gain is None else x.double() * gain
    for row, slot in enumerate(slots):
        rank = int(lora.ranks[slot])
        if slot:
            hidden = made.hidden.sum(0)[row].view(2, 16)[:, :rank].double()
            torch.testing.assert_close(hidden, lora.a[slot, :, :rank].double() @ weighted[row], rtol=1e-5, atol=1e-5)
    if form == "as they are":
        assert made.x is x
        assert made.squares is None
        return
    if gain is not None:
        squares = x.double().square().sum(1)
        torch.testing.assert_close(made.squares[0].double(), squares, rtol=1e-6, atol=0)
    if form == "weighted":
        torch.testing.assert_close(made.x.double(), weighted, rtol=1e-6, atol=0)
    else:
        decoded = unpair(made.x.float()) * made.scale[:, None]
        torch.testing.assert_close(made.scale.double(), weighted.abs().amax(1) / 448, rtol=1e-5, atol=0)
        torch.testing.assert_close(decoded.double(), weighted, rtol=2**-4, atol=1e-2)


def test_a_row_depends_on_no_other_and_not_on_adapters(device: torch.device) -> None:
    x, gain = torch.randn(5, 256, device=device), torch.rand(256, device=device)
    lora = adapters(device, [1, 2, 0, 3, 3])
    with_adapters, alone = prepare(x, gain, rows="weighted", lora=lora), prepare(x, gain, rows="weighted")
    one = prepare(x[3:4], gain, rows="weighted", lora=replace(lora, row_adapters=lora.row_adapters[3:4]))
    assert torch.equal(with_adapters.x, alone.x)
    assert torch.equal(with_adapters.squares, alone.squares)
    assert torch.equal(one.x, alone.x[3:4])
    assert torch.equal(one.squares, alone.squares[:, 3:4])
    rank = int(lora.ranks[3])
    assert torch.equal(one.hidden[:, :, :rank], with_adapters.hidden[:, 3:4, :rank])


def test_a_gathered_row_depends_on_no_other(device: torch.device) -> None:
    x = torch.randn(11, 256, device=device)
    together = adapters(device, [1, 2, 0, 3, 3, 3, 3, 3, 3, 3, 3])
    alone = replace(together, row_adapters=together.row_adapters[10:], active=together.active.new_tensor([1, 3, 0, 0]))
    rank = int(together.ranks[3])
    h, one = (prepare(part, lora=lora, config=GATHERED).hidden for part, lora in ((x, together), (x[10:], alone)))
    assert torch.equal(one[:, 0].unflatten(1, (2, 16))[..., :rank], h[:, 10].unflatten(1, (2, 16))[..., :rank])


def test_nothing_is_launched_for_nothing(device: torch.device) -> None:
    x = torch.zeros(2, 100, device=device)
    assert prepare(x) == (x, None, None, None)
    assert prepare(x[:0], torch.ones(100, device=device), rows="weighted").x.shape == (0, 100)
    with pytest.raises(ValueError, match="multiple of 128"):
        prepare(x, rows="float8")
