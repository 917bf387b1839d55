"""Rotations that config.json may ask for; what they compute is in tests/parity/test_yarn.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.lib.random_checkpoint import SHAPES
from services.common.errors import CheckpointRejected
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.rope import Yarn

PLAIN = SHAPES["qwen3.5-4b"]
CONTEXT = 262144


def config(**changes: Any) -> Qwen3_5Config:
    """Of the 4B model, with other rope_parameters and other keys beside them."""
    rope = PLAIN["rope_parameters"] | changes.pop("rope", {})
    return Qwen3_5Config.from_dict(PLAIN | {"rope_parameters": rope} | changes)


def test_what_the_model_card_says_makes_a_context_four_times_as_long() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
    lengthened = config(rope=rope)
    assert lengthened.max_position_embeddings == 4 * CONTEXT
    assert lengthened.yarn == Yarn(4.0, CONTEXT, 32.0, 1.0, True, pytest.approx(1.13863, abs=1e-5))
    assert lengthened.rope_theta == 1e7
    assert lengthened.rotary_dim == 64
    assert lengthened.digested() == config().digested()
    assert lengthened.rotation_identity() != config().rotation_identity() == ""
    assert config(rope=rope, max_position_embeddings=1_010_000).max_position_embeddings == 1_010_000


def test_keys_may_lie_elsewhere() -> None:
    """As in older checkpoints: in rope_scaling, with the type under another name, the original context beside it."""
    expected = config(rope={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096})
    older = {"type": "yarn", "factor": 2.0, "rope_theta": 1e7}
    data = {key: value for key, value in PLAIN.items() if key != "rope_parameters"} | {
        "rope_scaling": older,
        "original_max_position_embeddings": 4096,
    }
    assert Qwen3_5Config.from_dict(data) == expected
    nested = {"model_type": "qwen3_5", "text_config": data}
    assert dataclasses.replace(Qwen3_5Config.from_dict(nested), module_prefix="model.") == expected
    with pytest.raises(CheckpointRejected, match="rope_parameters and rope_scaling differ"):
        Qwen3_5Config.from_dict(PLAIN | {"rope_scaling": older})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "llama3"}, "'llama3' is not supported, only default, mrope, yarn are"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"rope_type": "yarn", "factor": "4"}, r"rope_parameters\.factor must be a positive number, got '4'"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}, r"beta_slow \(2.0\) is above beta_fast"),
        ({"rope_type": "yarn", "factor": 4, "truncate": "no"}, "truncate must be true or false"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 2.5}, "must be a positive integer, got 2.5"),
    ],
)
def test_refusals(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointRejected, match=message):
        config(rope=rope)
