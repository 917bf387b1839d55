"""Shapes of the published Qwen3.5 models; their config.json has them in a text_config, beside a vision model.

Sources: 0.8B and 27B github.com/THUDM/slime, scripts/models/qwen3.5-0.8B.sh and qwen3.5-27B.sh; 2B
apxml.com/models/qwen35-2b; 4B counted on a built model; 9B the defaults of transformers' Qwen3_5TextConfig; 35B-A3B
scripts/models/qwen3.5-35B-A3B.sh of slime. The parameters that they give are those of the names.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def _dense(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], value_heads: int, *, tied: bool
) -> dict[str, Any]:
    """Config of a dense model; ``heads`` are of queries and of keys, ``value_heads`` DeltaNet's beside 16 of keys."""
    return _COMMON | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
    }


DENSE: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _dense(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-2b": _dense(2048, 6144, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _dense(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _dense(4096, 12288, 32, (16, 4), 32, tied=False),
    "qwen3.5-27b": _dense(5120, 17408, 64, (24, 4), 48, tied=False),
}
SHAPES: dict[str, dict[str, Any]] = DENSE | {
    "qwen3.5-35b-a3b": _COMMON
    | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
}
