"""Adapters within products of few rows, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.gpu.linear.skinny import Norm, skinny_linear
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.linear.test_skinny import SPLIT, STAGGERED, STREAM, TMA, VECTOR, check, exact, inputs
from tests.kernels.gpu.lora.support import random_rows


@pytest.mark.parametrize("config", [VECTOR, STREAM, SPLIT, STAGGERED])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kind", ["none", "fp8"])
def test_adapters(device: torch.device, config: SkinnyConfig, swiglu: bool, kind: str) -> None:
    torch.manual_seed(3)
    slots = [2] if config is VECTOR else [2, 0, 1, 2]
    x, weight = inputs((len(slots), 96, 256), kind, torch.float32, device)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    lora = random_rows(slots, [0, 16, 5], (20, 48, 96), 256, device)
    out = skinny_linear(x, weight, norm=norm, swiglu=swiglu, lora=lora, config=config)
    expected = exact(x, weight, norm, None, swiglu, lora)
    check(out, expected, torch.float32, quantized=kind == "fp8" and config.variant == "tma")
    assert (out - skinny_linear(x, weight, norm=norm, swiglu=swiglu, config=config)).abs().max() > 0.1


@pytest.mark.parametrize("config", [VECTOR, STREAM, SPLIT, replace(TMA, splits=1)])
def test_more_adapters_and_ranks_than_are_held(device: torch.device, config: SkinnyConfig) -> None:
    torch.manual_seed(4)
    slots = [9] if config is VECTOR else [11, 0, 3, 9, 1, 2, 4, 5, 6, 7, 8, 10, 3]
    x, weight = inputs((len(slots), 96, 128), "none", torch.float32, device)
    ranks = [0, 40, 3, 17, 16, 1, 33, 40, 20, 40, 8, 32]
    lora = random_rows(slots, ranks, (20, 48, 96), 128, device, largest=40)
    for slot, rank in enumerate(ranks):
        lora.a[slot, :, rank:] = float("nan")
        lora.b[slot, rank:] = 0
    out = skinny_linear(x, weight, lora=lora, config=config)
    check(out, exact(x, weight, None, None, False, lora), torch.float32)
    plain = skinny_linear(x, weight, config=config)
    without = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(out[without], plain[without])
