"""The decode step that benchmarks.tuning.step.sweep takes apart, on the CPU."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.launches import counted, launches, no_products, one_share, without
from benchmarks.lib.random_checkpoint import TINY, config_of, write
from benchmarks.lib.random_model import RandomWeights
from benchmarks.lib.recorder import Recorder
from benchmarks.tuning.probe_launch import gaps
from benchmarks.tuning.step.decode_step import MATRICES, DecodeStep, one_of_each
from benchmarks.tuning.step.sweep import table
from benchmarks.tuning.step.variants import PRODUCTS, plan
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.loading.loader import load_checkpoint
from services.engine.models.qwen3_5.weights import LayerWeights
from services.engine.models.registry import read_config
from tests.kernels.gpu import interpreter  # noqa: F401

CPU = torch.device("cpu")
CONFIG = replace(one_of_each(read_config(TINY)), hidden_size=64, intermediate_size=64, vocab_size=64)


@pytest.fixture(scope="module")
def step() -> DecodeStep:
    made = DecodeStep(CONFIG, CPU, rows=3, context=20, adapters=2, dtype=torch.float32)
    made.refresh()
    return made


@pytest.mark.thorough
def test_whole_step_gives_logits_and_launches_each_kernel_of_a_layer(step: DecodeStep) -> None:
    with counted() as kernels:
        logits = step.launch(1, adapters=True, pdl=False)  # which the interpreter does not know
    assert logits.shape == (1, CONFIG.vocab_size)
    assert torch.isfinite(logits).all()
    assert kernels["_gated_delta_step_kernel"] == 2
    assert kernels["_decode_kernel"] == kernels["_qk_rope_kernel"] == 1
    assert "_conv_decode_kernel" not in kernels  # so few rows are convolved by their projection
    assert sum(kernels[name] for name in PRODUCTS) == 3 * 4 + 1


def test_parts_are_left_out(step: DecodeStep) -> None:
    with launches(lambda *_: False), counted() as kernels:
        whole = step.launch(3)
    with launches(lambda *_: False), counted() as some, without("_conv_decode_kernel"):
        without_products = step.launch(3, left_out=frozenset(MATRICES))
    assert without_products.shape == whole.shape
    assert set(some) == {"_gather_tokens_kernel", "_decode_kernel", "_qk_rope_kernel", "_gated_delta_step_kernel"}
    assert sum(some.values()) < sum(kernels.values())


def test_products_are_cut_up_otherwise(step: DecodeStep) -> None:
    chosen = step.chosen("gate_up", 3)
    assert chosen is not None
    with step.cut("gate_up", 3, replace(chosen, prefetch=1024)):
        assert step.chosen("gate_up", 3) == replace(chosen, prefetch=1024)
    with step.cut("gate_up", 3, None):
        assert step.chosen("gate_up", 3) is None
    assert step.chosen("gate_up", 3) == chosen


def test_shares_of_processes_that_compile_are_all_there_is() -> None:
    config = one_of_each(Qwen3_5Config.from_dict(config_of("qwen3.5-4b", vocab_size=512)))
    step = DecodeStep(config, CPU, rows=16, context=600, adapters=2, empty=True)
    options = Namespace(rows=[1, 16], adapters=2, only="")

    def launched(share: int | None) -> set[str]:
        with launches(lambda *_: False), counted() as found:
            if share is None:
                step.launch(16, adapters=True)
            else:
                with one_share(share, 4):
                    step.launch(16, adapters=True)
        return set(found)

    with no_products():
        wanted = plan(step, options)
        assert [variant.what for variant in wanted[:4]] == ["everything"] * 4
        assert len({(v.what, v.rows, v.adapters) for v in wanted}) == len(wanted)
        assert set.union(*(launched(share) for share in range(4))) == launched(None)


@pytest.mark.parametrize("shape", ["qwen3.5-4b", "qwen3.5-35b-a3b"])
def test_random_weights_are_stored_as_loaded_ones_are(shape: str, tmp_path: Path) -> None:
    data = config_of(shape, layers=4, vocab_size=300) | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    if "num_experts" in data:
        data |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    write(tmp_path, data)
    config = read_config(tmp_path)
    loaded = load_checkpoint(tmp_path, config, torch.bfloat16, CPU)
    made = RandomWeights(config, CPU, "none", None).build()

    def look(weights: Any) -> Any:
        if weights is None or isinstance(weights, int):
            return weights
        if isinstance(weights, torch.Tensor):
            return weights.dtype, tuple(weights.shape)
        if isinstance(weights, LayerWeights):
            return look(weights.mixer), [look(getattr(weights, field.name)) for field in fields(weights)]
        if hasattr(weights, "dense"):
            return look(weights.dense())
        return [look(getattr(weights, field.name)) for field in fields(weights)]

    assert [look(layer) for layer in made.layers] == [look(layer) for layer in loaded.layers]
    assert look(made.embedding) == look(loaded.embedding)
    assert look(made.head) == look(loaded.head)
    # Of a tied head the CPU has a copy.
    copied = 2 * config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert made.nbytes() == loaded.nbytes() - copied


def test_probe_counts_from_the_end_of_the_kernels_ahead() -> None:
    times = torch.tensor([[[0], [0], [60_000]], [[2_000], [61_000], [66_000]], [[61_500], [67_000], [72_000]]])
    assert gaps(times) == {
        "B.start-A.end": -58.0,
        "B.waited-A.end": 1.0,
        "C.start-A.end": 1.5,
        "C.start-B.end": -4.5,
        "C.waited-B.end": 1.0,
    }


def test_table_and_resumed_rows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "step.json")
    row = {"rows": 8, "adapters": False, "us": 3600.0, "finite": True}
    recorder.add({**row, "what": "everything", "difference_us": 0.0})
    recorder.add({**row, "what": "- conv", "us": 3550.0, "difference_us": -50.2, "finite": False, "launches": 24})
    recorder.add({"rows": 8, "adapters": False, "what": "- head", "failed": "OutOfResources"})
    again = Recorder(tmp_path / "step.json", resume=True)
    assert again.done({"what": "- conv", "rows": 8, "adapters": False})
    assert not again.done({"what": "- conv", "rows": 1, "adapters": False})
    text = table(again.rows, {"8": 2000.0})
    assert "3600" in text
    assert "~3550   -50.2 x24" in text
    assert "failed" in text
