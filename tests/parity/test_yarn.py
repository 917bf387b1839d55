"""Frequencies and scale of a lengthened context equal transformers'; logits and gradients are in test_family.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import rotation_of
from tests.parity.reference import BASE

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "keys",
    [
        {"factor": 4.0, "original_max_position_embeddings": 1024},
        {"factor": 2.5, "beta_fast": 8.0, "beta_slow": 0.25, "truncate": False},
        {"factor": 8.0, "attention_factor": 0.75, "beta_fast": None, "original_max_position_embeddings": 100},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 40.0, "mscale": 2.0, "rope_theta": 1e7},
        {"factor": None, "original_max_position_embeddings": 512},
        {"factor": 1.0},
        {"factor": 4.0, "beta_fast": 1e5, "beta_slow": 1e5},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_rotation(keys: dict[str, Any], head_dim: int) -> None:
    rope = BASE["rope_parameters"] | {"rope_type": "yarn"} | keys
    data = BASE | {"head_dim": head_dim, "rope_parameters": rope}
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**data | {"rope_parameters": dict(rope)}))
    ours = rotation_of(Qwen3_5Config.from_dict(data | {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}), CPU)
    assert torch.equal(ours.frequencies, theirs.inv_freq)
    assert ours.scale == theirs.attention_scaling
