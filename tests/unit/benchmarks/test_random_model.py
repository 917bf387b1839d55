"""Random weights are the kind of matrices that an engine of the same settings makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.lib.random_model import RandomWeights
from services.engine.models.footprint import Quantization
from tests.parity.fused_models import TINY


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
@pytest.mark.parametrize("empty", [False, True])
def test_all_products_of_a_batch_invariant_model_are(quantization: Quantization, empty: bool) -> None:
    config = replace(TINY, hidden_size=128, intermediate_size=128, linear_value_heads=8, num_heads=8)
    made = RandomWeights(config, torch.device("cpu"), quantization, None, empty=empty, invariant=True).build()
    layer = made.layers[0]
    for matrix in (made.head, layer.gate_up, layer.down, layer.mixer.in_proj, layer.mixer.out_proj):
        assert matrix.few(1000)
