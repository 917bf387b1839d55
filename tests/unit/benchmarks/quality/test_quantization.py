"""The quality figures: what they are taken from and how they are computed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.lib.random_checkpoint import TINY, config_of, write
from benchmarks.quality.rounding.quantization import held_out_queries, perplexity, relative_error
from benchmarks.quality.rounding.scorers import Mode, Query, TorchScorer
from services.engine.models.footprint import Storage
from services.engine.models.qwen3_5.model import Qwen3_5


@pytest.fixture(scope="module")
def tiny() -> Qwen3_5:
    return Qwen3_5.from_directory(TINY, dtype="float32", device="cpu")


def test_nested_prefixes_score_like_single_ones(tiny: Qwen3_5) -> None:
    text = tuple(range(7, 40))
    queries = [Query(text[:end], text[end]) for end in (1, 5, 17, 32)] + [Query((9, 9, 9), 4), Query(text[:5], 3)]
    together = TorchScorer(tiny).score(queries)
    alone = [TorchScorer(tiny).score([query])[0] for query in queries]
    assert together == pytest.approx(alone, abs=1e-4)


def test_float8_pages_change_a_little(tiny: Qwen3_5) -> None:
    queries = held_out_queries(1)[:40]
    plain, rounded = TorchScorer(tiny).score(queries), TorchScorer(tiny, float8_kv=True).score(queries)
    assert plain != rounded
    assert perplexity(rounded) == pytest.approx(perplexity(plain), rel=0.05)


def test_quantized_perplexity_stays_near() -> None:
    queries = held_out_queries(2)
    found = {}
    for storage in (Storage(), Storage("fp8", float8_head=True), Storage("int4", float8_head=True)):
        model = Qwen3_5.from_directory(TINY, dtype="bfloat16", device="cpu", storage=storage)
        found[storage.quantization] = perplexity(TorchScorer(model).score(queries))
    assert found["fp8"] == pytest.approx(found["none"], rel=0.02)
    assert found["int4"] == pytest.approx(found["none"], rel=0.05)


def test_relative_error_ignores_what_softmax_ignores() -> None:
    logits = torch.randn(3, 8, dtype=torch.float64)
    shifted = logits + torch.randn(3, 1, dtype=torch.float64)
    assert relative_error(shifted.flatten().tolist(), logits.flatten().tolist(), 8) == pytest.approx(0, abs=1e-12)
    doubled = (2 * logits).flatten().tolist()
    assert relative_error(doubled, logits.flatten().tolist(), 8) == pytest.approx(1)
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)


def test_names_of_modes() -> None:
    assert Mode().name == "bf16"
    assert Mode("int4", "fp8", "bfloat16").name == "int4 + kv fp8 + state bf16"
    assert Mode("fp8", float8_checkpoint=True).name == "fp8 of an fp8 checkpoint"


def test_a_random_checkpoint_loads(tmp_path: Path) -> None:
    config = config_of("qwen3.5-0.8b", layers=4, vocab_size=2100)
    config |= {"hidden_size": 64, "intermediate_size": 96, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    write(tmp_path, config)
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 40
    model = Qwen3_5.from_directory(tmp_path, dtype="bfloat16", device="cpu")
    scores = TorchScorer(model).score([Query((1, 2, 3), token) for token in range(2100)])
    assert sum(map(math.exp, scores)) == pytest.approx(1, abs=1e-3)
    assert -20 < min(scores) < max(scores) < -1
