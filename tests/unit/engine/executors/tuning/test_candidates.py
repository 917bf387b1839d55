"""Candidates fit their device, and surround what is there."""

from __future__ import annotations

from typing import get_args

import pytest

from kernels.gpu.attention.decode import DecodeConfig, decode_splits
from kernels.gpu.configs import KernelConfigs, Product
from kernels.gpu.launch.device import architectures, named
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig
from services.engine.executors.tuning.candidates import attention, fits, neighbours, others

SHAPES = ((18432, 2560), (2560, 9216), (12352, 2560), (2560, 4096), (6144, 1024), (1024, 3584))
ROWS = (1, 2, 8, 16, 24, 64)


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("kind", get_args(Kind))
def test_candidates_fit_the_device(architecture: str, kind: Kind) -> None:
    device = named(architecture)
    kernels = KernelConfigs(device)
    for outputs, inputs in SHAPES:
        product = Product(kind, outputs, inputs)
        for rows in ROWS:
            table = kernels.table(rows, product, swiglu=False)
            found = [*neighbours(table, rows, product, device), *others(table, rows, product, device)]
            assert table not in found
            assert len(found) == len(set(found)) > 3
            for each in found:
                if each is None:
                    assert rows > 1
                    continue
                assert fits(each, rows, product, device)
                if each.variant == "tma":
                    assert device.programmatic_launch
                    assert (device.size, kind != "int4") == ("wide", True)
                    bytes_a_column = (each.block_n + max(16, rows)) * (1 if kind == "fp8" else 2)
                    assert each.stages * each.block_k * bytes_a_column < device.shared_memory
            early = [each.early for each in neighbours(table, rows, product, device)][:2]
            assert early == [True, False]


def test_a_vendors_product_has_the_streaming_variants_beside_it() -> None:
    product = Product("none", 2560, 9216)
    found = list(others(None, 64, product, named("sm90")))
    assert {each.variant for each in found if each is not None} == {"tma", "dot"}
    assert None not in found


def test_attention_has_no_more_splits_than_are_launched() -> None:
    for device in map(named, architectures()):
        for rows in ROWS:
            now = DecodeConfig(32, 4, 3, 8)
            found = list(attention(now, rows, 4, device))
            assert found
            assert now not in found
            assert max(each.splits for each in found) <= decode_splits(rows, 4, device)


def test_an_unknown_shape_of_a_variant_does_not_fit() -> None:
    device, product = named("sm90"), Product("fp8", 2560, 4096)
    assert not fits(SkinnyConfig("tma", 64, 512, 4, 2), 8, product, device)
    assert not fits(SkinnyConfig("vector", 4, 512, 2), 8, product, device)
    assert not fits(SkinnyConfig("stream", 16, 512, 4, 2), 24, product, device)
    assert not fits(SkinnyConfig("dot", 64, 64, 4, 2), 24, product, device)
