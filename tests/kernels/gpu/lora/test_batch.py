"""Adapters of mixed batches on the GPU against float64, whatever slots, ranks, targets and row counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.gpu.activations import swiglu
from kernels.gpu.linear.preparation import shrink
from kernels.gpu.lora.expand import ExpandConfig, expand_add, expand_swiglu
from kernels.gpu.lora.rows import LoraRows, active_slots
from kernels.gpu.lora.shrink import ShrinkConfig
from services.common.jobs import LoraSettings
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import layer_groups
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.registry import read_config
from tests.kernels.gpu import interpreter  # noqa: F401

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make(
    device: torch.device,
    row_adapters: list[int],
    *,
    slots: int = 4,
    rank: int = 16,
    ranks: list[int] | None = None,
    depth: int = 72,
    sizes: tuple[int, ...] = (40, 4, 20),
    dtype: torch.dtype = torch.float32,
) -> LoraRows:
    generator = torch.Generator().manual_seed(len(row_adapters))
    a = torch.randn(slots, len(sizes), rank, depth, generator=generator) / depth**0.5
    b = torch.randn(slots, rank, sum(sizes), generator=generator) / rank**0.5
    ends = tuple(sum(sizes[: place + 1]) for place in range(len(sizes)))
    return LoraRows(
        a.to(device, dtype),
        b.to(device, dtype),
        ends,
        torch.tensor(ranks or [rank] * slots, dtype=torch.int32, device=device),
        torch.tensor(row_adapters, dtype=torch.int32, device=device),
        torch.tensor(active_slots(row_adapters, slots - 1), dtype=torch.int32, device=device),
    )


def exact(x: Tensor, lora: LoraRows) -> Tensor:
    """Sum that the adapters add, in float64."""
    rows = []
    for row, slot in zip(x.double(), lora.row_adapters.tolist(), strict=True):
        rank, parts, begin = int(lora.ranks[slot]), [], 0
        for target, end in enumerate(lora.ends):
            down = lora.a[slot, target, :rank].double() @ row
            parts.append(lora.b[slot, :rank, begin:end].double().t() @ down * (slot > 0))
            begin = end
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def check(x: Tensor, lora: LoraRows, **configs: object) -> None:
    base = torch.randn(x.shape[0], lora.ends[-1], device=x.device).to(x.dtype)
    out = base.clone()
    expand_add(shrink(x, lora, config=configs.get("shrink")), lora, out, config=configs.get("expand"))  # type: ignore[arg-type]
    expected = base.double() + exact(x, lora)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[x.dtype], rtol=TOLERANCES[x.dtype])
    without = lora.row_adapters == 0
    assert torch.equal(out[without], base[without])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_adapters", [[0], [2], [0, 3, 1, 1, 0, 2, 3], [1] * 70 + [0] * 20 + [3] * 45])
def test_each_row_gets_its_own_adapter(device: torch.device, row_adapters: list[int], dtype: torch.dtype) -> None:
    lora = make(device, row_adapters, dtype=dtype)
    check(torch.randn(len(row_adapters), 72, device=device).to(dtype), lora)


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(48,), (33, 7), (16, 16, 5, 5)])
@pytest.mark.parametrize("rank", [4, 16, 40])
def test_targets_and_ranks_of_any_size(device: torch.device, sizes: tuple[int, ...], rank: int) -> None:
    lora = make(device, [1, 2, 0, 3, 2], rank=rank, sizes=sizes, depth=100)
    check(torch.randn(5, 100, device=device), lora)


def test_nothing_beyond_an_adapters_rank_counts(device: torch.device) -> None:
    lora = make(device, [1, 2, 3, 3], rank=32, ranks=[0, 32, 16, 3])
    for slot, rank in enumerate(lora.ranks.tolist()):
        lora.a[slot, :, rank:] = float("nan")
        lora.b[slot, rank:] = 0
    check(torch.randn(4, 72, device=device), lora)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_cut_gives_the_same(device: torch.device, splits: int) -> None:
    x = torch.randn(20, 200, device=device)
    lora = make(device, [0, 1, 2, 3] * 5, depth=200)
    check(x, lora, shrink=ShrinkConfig(16, 16, 32, splits, 4, 2), expand=ExpandConfig(16, 32, 4))
    check(x, lora, shrink=ShrinkConfig(32, 64, 64, splits, 4, 2), expand=ExpandConfig(32, 64, 4))
    check(x, lora, shrink=ShrinkConfig(1, 4, 256, splits, 4, 1), expand=ExpandConfig(32, 64, 4))


@pytest.mark.parametrize("row_adapters", [[2] * 19, list(range(1, 12)), [3, 0, 1] * 6 + [0, 7, 1, 1]])
def test_rows_are_gathered_by_slot(device: torch.device, row_adapters: list[int]) -> None:
    x = torch.randn(len(row_adapters), 88, device=device)
    lora = make(device, row_adapters, slots=13, ranks=[0, 16, 3, 9, *range(1, 10)], rank=20, depth=88, sizes=(20, 5))
    # Slots behind the active ones are none of the step's.
    lora.active[1 + int(lora.active[0]) :] = 12
    check(x, lora, shrink=ShrinkConfig(8, 16, 32, 2, 1, gathered=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "sizes", "config"),
    [(3, (40, 40), None), (70, (24, 24), None), (37, (33, 33), ExpandConfig(32, 16, 4)), (20, (9, 4, 13), None)],
)
def test_before_the_activation(
    device: torch.device, dtype: torch.dtype, rows: int, sizes: tuple[int, ...], config: ExpandConfig | None
) -> None:
    lora = make(device, [0, 3, 1, 2, 0] * (rows // 5) + [1] * (rows % 5), rank=24, sizes=sizes, dtype=dtype)
    x = torch.randn(rows, 72, device=device, dtype=dtype)
    gate_up = torch.randn(rows, sum(sizes), device=device).to(dtype)
    out = expand_swiglu(shrink(x, lora), lora, gate_up, config=config)
    gate, up = (gate_up.double() + exact(x, lora)).chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(out.double(), expected, atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])
    without = lora.row_adapters == 0
    assert torch.equal(out[without], swiglu(gate_up)[without])


def test_a_norm_folded_in_leaves_only_the_rms_to_the_product(device: torch.device) -> None:
    x, weight = torch.randn(6, 72, device=device), torch.rand(72, device=device) + 0.5
    lora = make(device, [1, 2, 3, 0, 1, 2])
    out = torch.zeros(6, lora.ends[-1], device=device)
    expand_add(shrink(x, lora, weight), lora, out)
    rms = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(out.double() * rms, exact(x * weight, lora) * rms, atol=1e-4, rtol=1e-4)


def test_an_invariant_row_does_not_depend_on_the_others(device: torch.device) -> None:
    x = torch.randn(80, 72, device=device)
    numbers = [1, 2, 3, 0, 1, 2, 3, 3] * 10
    together = replace(make(device, numbers), invariant=True)
    h = shrink(x, together)
    for rows in (slice(0, 1), slice(2, 5), slice(0, 17), slice(8, 80)):
        active = together.active.new_tensor(active_slots(numbers[rows], 3))
        part = replace(together, row_adapters=together.row_adapters[rows], active=active)
        used = part.row_adapters > 0
        assert torch.equal(shrink(x[rows], part)[:, used], h[:, rows][:, used])


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    lora = make(device, [1])
    with pytest.raises(ValueError, match=r"x must be \[T, 72\]"):
        shrink(torch.zeros(1, 71, device=device), lora)
    with pytest.raises(ValueError, match=r"out must be \[1, 64\]"):
        expand_add(torch.zeros(1, 1, 48, device=device), lora, torch.zeros(2, 64, device=device))
    with pytest.raises(ValueError, match="2 splits of block_k 32 do not cover 72 inputs"):
        shrink(torch.zeros(1, 72, device=device), lora, config=ShrinkConfig(1, 4, 32, 2, 4, 1))
    with pytest.raises(ValueError, match="32 inputs a warp"):
        ShrinkConfig(8, 16, 64, 1, 4, gathered=True)
    with pytest.raises(ValueError, match="ends"):
        LoraRows(lora.a, lora.b, (40, 44), lora.ranks, lora.row_adapters, lora.active)


def test_active_slots() -> None:
    assert active_slots([0, 3, 1, 3, 0], 4) == [2, 1, 3, 0, 0]
    assert active_slots([0, 0], 2) == [0, 0, 0]
    with pytest.raises(ValueError, match="3 adapters in one step, the capacity is 2"):
        active_slots([1, 2, 3], 2)


def test_the_slots_of_a_model_are_what_the_kernels_read(device: torch.device) -> None:
    config = read_config(Path(__file__).parents[4] / "models" / "tiny")
    slots = LoraSlots(config, 4, 8, torch.float32, device)
    for slot, rank in ((1, 8), (3, 4)):
        params = LoraParams.create(config, LoraSettings(rank=rank, alpha=8.0, seed=slot))
        for target in params.targets.values():
            target.b.data.normal_(generator=torch.Generator().manual_seed(rank))
        slots.load(slot, bind_adapter(params.to_files("tiny"), config, max_rank=8))
    numbers = [3, 0, 1, 1, 3]
    adapters = torch.tensor(numbers, dtype=torch.int32, device=device)
    active = torch.tensor(active_slots(numbers, 3), dtype=torch.int32, device=device)
    for layer in (0, 3):
        for group in layer_groups(config, layer):
            lora = slots.rows(layer, group.name, adapters, active)
            assert [int(rank) for rank in lora.ranks] == [0, 8, 0, 4]
            check(torch.randn(len(numbers), group.in_features, device=device), lora)
            assert lora.ranks.data_ptr() % 16 == 0
            assert lora.a.data_ptr() == slots.rows(layer, group.name, adapters, active).a.data_ptr()


def test_an_adapter_of_a_few_modules_has_no_rank_at_the_others(device: torch.device) -> None:
    config = read_config(Path(__file__).parents[4] / "models" / "tiny")
    slots = LoraSlots(config, 2, 8, torch.float32, device)
    params = LoraParams.create(config, LoraSettings(rank=6, target_modules=["q_proj", "down_proj"]))
    slots.load(1, bind_adapter(params.to_files("tiny"), config, max_rank=8))
    adapters = active = torch.tensor([1, 1], dtype=torch.int32, device=device)
    found = {
        (layer, group): slots.rows(layer, group, adapters, active).ranks.tolist()
        for layer in (2, 3)
        for group in ("in", "out", "gate_up", "down")
    }
    with_rank = {place for place, ranks in found.items() if ranks == [0, 6]}
    assert with_rank == {(2, "down"), (3, "in"), (3, "down")}
    assert all(ranks == [0, 0] for place, ranks in found.items() if place not in with_rank)
    slots.clear(1)
    assert slots.rows(3, "in", adapters, active).ranks.tolist() == [0, 0]
