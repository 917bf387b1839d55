"""Every choice of a kernel's cut follows the device's limits."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels.gpu.attention.decode import decode_config, decode_splits
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.attention.prefill import OVERLAPPED, prefill_config
from kernels.gpu.configs import KernelConfigs, Product
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.launch.device import DeviceLimits, architectures, limits_of, named
from kernels.gpu.linear.fp8 import fp8_config
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig, choose, most_rows
from kernels.gpu.lora.shrink import shrink_config
from kernels.gpu.train.gated_delta import scan_cut
from tests.kernels.gpu import interpreter  # noqa: F401

CARDS = [named(name) for name in architectures()]
SMALL = [card for card in CARDS if card.shared_memory < 100 * 1024]


def pages(dtype: torch.dtype) -> KvPages:
    scales = torch.empty(2, 16, 4) if dtype == torch.float8_e4m3fn else None
    keys = torch.empty(2, 16, 4, 256, dtype=dtype)
    return KvPages(keys, keys.clone(), scales, scales)


def test_architectures_have_their_sizes() -> None:
    sizes = {name: named(name).size for name in architectures()}
    assert sizes == {
        "sm80": "large",
        "sm86": "small",
        "sm89": "small",
        "sm90": "wide",
        "sm100": "wide",
        "sm120": "small",
    }
    assert [card.architecture for card in CARDS] == [80, 86, 89, 90, 100, 120]
    assert [card.float8 for card in CARDS] == [False, False, True, True, True, True]
    assert [card.programmatic_launch for card in CARDS] == [False, False, False, True, True, True]


def test_an_architecture_that_is_not_compiled_for_is_named() -> None:
    with pytest.raises(ValueError, match=r"'sm70' is none of sm80, sm86, sm89, sm90, sm100, sm120"):
        named("sm70")


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        DeviceLimits("card", (8, 0), 0, 108, 65536, 1, 1, 1.0)


def test_a_device_as_another_has_the_lower_of_both_limits() -> None:
    forced = named("sm90").as_on(named("sm89"))
    assert (forced.capability, forced.shared_memory, forced.size) == ((8, 9), 99 * 1024, "small")
    assert forced.multiprocessors == named("sm90").multiprocessors
    assert not forced.programmatic_launch
    # What the card itself lacks no name gives it.
    assert named("sm80").as_on(named("sm100")).shared_memory == named("sm80").shared_memory


def test_without_a_gpu_the_limits_are_those_of_the_card_that_was_measured() -> None:
    forced = os.environ.get("TEMPER_DEVICE_LIMITS")
    assert limits_of(torch.device("cpu")) == (named("sm90").as_on(named(forced)) if forced else named("sm90"))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.architecture)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_decode_attention_fills_any_card_and_fits_it(card: DeviceLimits, dtype: torch.dtype) -> None:
    kv = pages(dtype)
    for batch in (1, 2, 4, 8, 16, 32, 64, 256):
        config = decode_config(kv, batch, card)
        # Keys and values of all steps in flight but the one at work, which is in registers.
        assert 2 * config.block_keys * 256 * dtype.itemsize * (config.stages - 1) < card.shared_memory
        assert 1 <= config.splits <= 64
        # Where rows alone do not fill the card, their parts do: at least half of its multiprocessors.
        programs = batch * 4 * min(config.splits, decode_splits(batch, 4, card))
        assert 2 * programs >= card.multiprocessors


def test_only_hopper_has_the_overlapped_prefill_and_copies_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    overlapped = {card.architecture for card in CARDS if prefill_config(pages(torch.bfloat16), 16, card) == OVERLAPPED}
    assert overlapped == {90}
    by_tma = {card.architecture for card in CARDS if choose(32, 18432, 2560, "none", True, card).variant == "tma"}
    assert by_tma == {90, 100}


def test_small_cards_get_small_cuts() -> None:
    for card in SMALL:
        assert fp8_config(card) != fp8_config(named("sm90"))
        assert most_rows(18432, 2560, "none", card) == 16
        dot = choose(64, 18432, 2560, "int4", True, card)
        assert (dot.variant, dot.stages) == ("dot", 2)


def test_adapters_beside_a_product_are_fewer_where_registers_are() -> None:
    """tests/kernels/compile_table has what is spilled."""
    products: list[tuple[int, Kind]] = [(7, "none"), (16, "none"), (4, "int4"), (8, "int4"), (16, "int4")]
    slots = {
        name: [choose(rows, 18432, 2560, kind, True, named(name)).slots for rows, kind in products]
        for name in architectures()
    }
    assert slots["sm90"] == [8, 8, 8, 4, 4]
    assert slots["sm100"] == [2, 8, 4, 4, 4]
    assert slots["sm120"] == [1, 1, 8, 8, 8]
    assert slots["sm80"] == [2, 2, 2, 4, 8]
    assert slots["sm86"] == slots["sm89"] == [2, 2, 8, 8, 8]


def test_parts_of_k_follow_the_number_of_multiprocessors() -> None:
    few, many = named("sm89"), named("sm120")
    assert shrink_config(4096, 2560, 64, few).splits < shrink_config(4096, 2560, 64, many).splits
    assert choose(64, 2560, 4096, "fp8", False, few).splits < choose(64, 2560, 4096, "fp8", False, many).splits


def test_what_was_tuned_comes_before_the_table() -> None:
    kernels = KernelConfigs(named("sm90"))
    weight = torch.empty(256, 128, dtype=torch.bfloat16)
    usual = kernels.product(4, weight, swiglu=False)
    other = SkinnyConfig("stream", 16, 128, 4, 3)
    kernels.tuned.products[Product("none", 256, 128), 4] = other
    assert kernels.product(4, weight, swiglu=False) == other != usual
    assert kernels.streams(4, weight)
    kernels.tuned.products[Product("none", 256, 128), 4] = None  # the vendor's
    assert not kernels.streams(4, weight)
    assert kernels.streams(5, weight)
    kv = pages(torch.bfloat16)
    attention = decode_config(kv, 64, kernels.device)
    kernels.tuned.attention[1] = attention
    assert kernels.decode(kv, 1) == attention


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(12288, 2048), (2048, 6144), (24576, 4096), (5120, 17408), (248320, 5120)]
)
@pytest.mark.parametrize("kind", ["none", "fp8"])
def test_large_matrices_of_any_size_stream_in_tiles(outputs: int, inputs: int, kind: Kind) -> None:
    card = named("sm90")
    assert most_rows(outputs, inputs, kind, card) == 64
    for rows in (2, 16, 64):
        config = choose(rows, outputs, inputs, kind, False, card)
        assert config.variant == "tma"
        itemsize = 2 if kind == "none" else 1
        assert config.stages * config.block_k * (config.block_n + 64) * itemsize <= card.shared_memory
        assert inputs // config.splits >= 4 * config.block_k or config.splits == 1
        programs = outputs // config.block_n * config.splits
        assert 2 * programs >= card.multiprocessors or inputs // (4 * config.block_k) == config.splits
    assert choose(1, outputs, inputs, kind, False, card).variant == "vector"


def test_few_outputs_share_inputs_between_warps_and_few_inputs_need_no_copy_engine() -> None:
    card = named("sm90")
    assert [choose(rows, 7168, 1024, "none", True, card).variant for rows in (1, 4, 64)] == ["vector", "tma", "dot"]
    assert [choose(rows, 1024, 3584, "none", False, card).variant for rows in (2, 16, 17)] == [
        "stream",
        "stream",
        "tma",
    ]
    assert choose(16, 1024, 3584, "fp8", False, card).variant == "tma"
    assert choose(1, 1024, 3584, "none", False, card).block_n < choose(1, 2048, 3584, "none", False, card).block_n


@pytest.mark.parametrize("count", [1, 2, 4, 64])
def test_a_training_scan_keeps_two_tiles_in_flight_in_little_shared_memory(count: int) -> None:
    """Three take 100 KiB, however many multiprocessors there are."""
    shape = DeltaShape(16, 32, 128, 128)
    for card in CARDS:
        for multiprocessors in (20, 58, 142, 192):
            cut = scan_cut(shape, count, torch.bfloat16, replace(card, multiprocessors=multiprocessors))
            assert cut.num_stages == (2 if card.size == "small" else 3)
