"""Norms of what an adapter adds, against the matrices themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from services.adapter_tools.norms import norms
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.peft_config import WEIGHTS_FILE
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.registry import read_config
from tests.unit.adapter_tools.adapters import adapter


@pytest.mark.parametrize("rslora", [False, True])
def test_norms_are_those_of_the_products(checkpoint: Path, rslora: bool) -> None:
    config = read_config(checkpoint)
    files = adapter(config, rank=3, alpha=5.0, rslora=rslora)
    lora = LoraParams.from_bound(bind_adapter(files, config, max_rank=8))
    expected: dict[str, float] = {}
    for path, target in lora.targets.items():
        kind = path.rsplit(".", 1)[-1]
        square = float((target.scale * target.b.detach().double() @ target.a.detach().double()).square().sum())
        expected[kind] = expected.get(kind, 0.0) + square
    found = norms(files)
    assert found["finite"] is True
    assert found["norms"] == pytest.approx({kind: math.sqrt(square) for kind, square in expected.items()})
    assert found["norm"] == pytest.approx(math.sqrt(sum(expected.values())))


def test_a_number_that_is_not_finite_is_seen(checkpoint: Path) -> None:
    files = adapter(read_config(checkpoint))
    tensors = load(files[WEIGHTS_FILE])
    next(iter(tensors.values()))[0, 0] = torch.nan
    assert norms({**files, WEIGHTS_FILE: save(tensors)}) == {"finite": False, "norms": {}, "norm": None}
