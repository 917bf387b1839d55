"""An engine with random weights of a shape, and the least time of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lib.in_process import InProcessEngine, settings_for
from benchmarks.lib.random_checkpoint import SHAPES, config_of, without_weights
from benchmarks.serving.floor import distinct_experts, state_bytes, step_bytes
from benchmarks.serving.random_engine import made_on_the_device
from services.engine.models.footprint import Formats, Storage
from services.engine.models.registry import read_config

SMALL = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "linear_num_key_heads": 2}
SMALL |= {"linear_num_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SMALL |= {"shared_expert_intermediate_size": 64, "vocab_size": 2048}


def test_an_engine_is_made_of_a_config(tmp_path: Path) -> None:
    directory = without_weights(tmp_path / "made", config_of("qwen3.5-35b-a3b", layers=4) | SMALL)
    with made_on_the_device():
        engine = InProcessEngine(settings_for(directory, "cpu", max_num_seqs=2, token_budget=64))
    try:
        run = engine.generate(engine.prompts(2, 9), 3)
        assert len([update for _, updates in run.steps for update in updates if update.token is not None]) == 6
    finally:
        engine.stop()


def test_a_large_step_writes_states_late(tmp_path: Path) -> None:
    """A token reads 64 KiB of each of 32 heads of 24 layers, and as much as is written of the newest eight writes."""
    config = read_config(without_weights(tmp_path, SHAPES["qwen3.5-4b"]))
    formats = Formats(2, waiting_writes=8)
    conv, head, write = 24 * 8192 * 3 * 2, 128 * 128 * 4, 128 * 2 + 128 * 4 + 4
    assert state_bytes(config, formats, 1) == 2 * (conv + 24 * 32 * head)
    late = 2 * conv + 24 * 32 * (1.125 * head + 4.5 * write)
    assert state_bytes(config, formats, 64) == pytest.approx(late, rel=0.01)


def test_a_step_reads_the_experts_that_its_rows_choose(tmp_path: Path) -> None:
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    torch.manual_seed(0)
    drawn = [len({int(e) for _ in range(64) for e in torch.randperm(256)[:8]}) for _ in range(40)]
    assert distinct_experts(256, 8, 64) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    config = read_config(without_weights(tmp_path, SHAPES["qwen3.5-35b-a3b"]))
    parts = step_bytes(config, Formats(2, Storage("fp8", float8_head=True)), 1, 0)
    # Of 256 experts 8, each of 3 · 2048 · 512 numbers and 3,072 scales, in 40 layers.
    assert parts["experts"] == pytest.approx(40 * 8 * (3 * 2048 * 512 + 4 * 3072))
    assert sum(parts.values()) == pytest.approx(3.1e9, rel=0.05)
