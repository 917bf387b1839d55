"""Memory of every dense size of the family: the plan counts what weights take, and the sizes fit their cards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.lib.checkpoints.family import DENSE
from benchmarks.lib.random_model import RandomWeights
from services.common.errors import DoesNotFit
from services.engine.models.footprint import Formats, Quantization, Storage, weight_bytes
from services.engine.models.lora.targets import target_shapes
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.pod.memory import plan
from tests.unit.pod.test_memory import BF16, GIB, H200, settings

CONFIGS = {name: Qwen3_5Config.from_dict(data) for name, data in DENSE.items()}


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
@pytest.mark.parametrize("size", CONFIGS)
def test_counts_what_weights_take(size: str, quantization: Quantization) -> None:
    """A layer of each kind in its true shape; the memory is never touched."""
    config = replace(CONFIGS[size], vocab_size=512, layer_types=("linear_attention", "full_attention"))
    made = RandomWeights(config, torch.device("cpu"), quantization, None, empty=True)
    storage = Storage(quantization, float8_head=quantization != "none", int4_draft_head=True)
    assert weight_bytes(config, Formats(2, storage)) == made.build().nbytes()
    drafting = replace(made, mtp=True, draft_head=True).build()
    assert weight_bytes(config, Formats(2, storage, mtp=True)) == drafting.nbytes()


@pytest.mark.parametrize(("size", "billions"), zip(CONFIGS, (0.752, 1.882, 4.206, 8.954, 26.896), strict=True))
def test_parameters(size: str, billions: float) -> None:
    """Of the model, as its name says; an adapter may change eight linear maps of a DeltaNet layer, seven of the
    others."""
    config = CONFIGS[size]
    assert config.parameters() / 1e9 == pytest.approx(billions, abs=1e-3)
    assert len(target_shapes(config)) == 8 * config.num_linear_layers + 7 * config.num_full_layers


@pytest.mark.parametrize(
    ("size", "gib", "quantization", "sequences"),
    [
        ("qwen3.5-0.8b", 16, "none", 128),
        ("qwen3.5-2b", 16, "none", 64),
        ("qwen3.5-9b", 24, "fp8", 16),
        ("qwen3.5-9b", 40, "none", 64),
        ("qwen3.5-27b", 40, "int4", 8),
        ("qwen3.5-27b", 80, "none", 16),
        ("qwen3.5-27b", 80, "fp8", 64),
    ],
)
def test_serves_and_trains_on(size: str, gib: int, quantization: str, sequences: int) -> None:
    chosen, made = plan(CONFIGS[size], settings(quantization=quantization), BF16, H200, int((gib - 1.3) * GIB))
    assert chosen.max_num_seqs >= sequences
    assert made.training > 0.5 * GIB


def test_what_does_not_fit_is_told_what_does() -> None:
    with pytest.raises(DoesNotFit, match=r"TEMPER_QUANTIZATION=fp8 \(weights 26\.\d+ GiB instead of 50\.\d+ GiB\)"):
        plan(CONFIGS["qwen3.5-27b"], settings(), BF16, H200, 38 * GIB)
