"""Random small models with the ratios of the published sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from benchmarks.lib.checkpoints.family import DENSE
from tests.parity import reference
from tests.parity.reference import make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
"""A context that the tests' prompts exceed, lengthened."""


def small(size: str, seed: int) -> dict[str, Any]:
    """Settings of a model with the heads' ratios, the pattern of layers and the head of a published size; widths are
    drawn. All heads together are never as wide as the hidden states, as in most published sizes."""
    true, rng = DENSE[size], random.Random(f"{size} {seed}")
    kv_heads, key_heads = rng.choice((1, 2)), rng.choice((1, 2))
    heads = kv_heads * true["num_attention_heads"] // true["num_key_value_heads"]
    head_dim = rng.choice((8, 16, 24))
    return {
        "vocab_size": rng.randrange(190, 230),
        "hidden_size": rng.choice([width for width in range(24, 64, 4) if width != heads * head_dim]),
        "intermediate_size": 4 * rng.randrange(8, 20),
        "num_hidden_layers": rng.choice((4, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * true["linear_num_value_heads"] // true["linear_num_key_heads"],
        "linear_key_head_dim": 2 * rng.randrange(6, 13),
        "linear_value_head_dim": 2 * rng.randrange(6, 13),
        "tie_word_embeddings": true["tie_word_embeddings"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7 if seed % 2 else 1e4,
            "partial_rotary_factor": 0.25 if head_dim != 24 else 0.5,
        },
    }


def make_flat(settings: dict[str, Any], path: Path) -> Any:
    """Saves a checkpoint of the text class, and returns transformers' model of it."""
    with patch.dict(reference.CONFIGS, family=settings):
        return make_checkpoint("family", path)


@torch.no_grad()
def make_multimodal(settings: dict[str, Any], path: Path) -> Qwen3_5ForConditionalGeneration:
    """Saves a checkpoint of the multimodal class, as the published ones are, with the text model of make_flat(), and
    returns transformers' model of it."""
    flat = make_flat(settings, path)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 2}
    vision |= {"out_hidden_size": settings["hidden_size"], "num_position_embeddings": 4}
    tied = settings["tie_word_embeddings"]
    config = Qwen3_5Config(text_config=flat.config.to_dict(), vision_config=vision, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(flat.model.state_dict())
    model.lm_head.load_state_dict(flat.lm_head.state_dict())
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    return model
