"""Every dense size of the family equals transformers: random small models with its ratios, flat and multimodal, with
and without a lengthened context. Serving's logits, and training's gradients of LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lib.checkpoints.float8 import convert
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.family import DENSE, YARN, make_flat, make_multimodal, small
from tests.parity.reference import BAR, Driver, prompt, reference_logits
from tests.parity.test_gradients import assert_equal_gradients, gradients, our_logprobs, sft, their_logprobs

sizes = pytest.mark.parametrize("size", DENSE)
DOCUMENTS = [prompt(length, vocab=190) for length in (70, 2, 33)]


def with_yarn(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"rope_parameters": settings["rope_parameters"] | YARN}


def served(model: Qwen3_5, tokens: list[int]) -> Tensor:
    """Logits of all rows: two chunks of the prompt, then token by token."""
    driver = Driver(model)
    place, logits = driver.prefill(tokens[:-5], 48)
    return torch.cat([logits, *(driver.run([(place, [token])])[0] for token in tokens[-5:])])


@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@sizes
def test_logits_of_a_flat_checkpoint(size: str, yarn: bool, tmp_path: Path) -> None:
    settings = small(size, seed=1)
    reference = make_flat(with_yarn(settings) if yarn else settings, tmp_path)
    model = Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu")
    assert (model.config.yarn is not None) == yarn
    tokens = prompt(150, vocab=190)
    assert (served(model, tokens) - reference_logits(reference, tokens)).abs().max() <= BAR


@sizes
def test_logits_of_a_multimodal_checkpoint(size: str, tmp_path: Path) -> None:
    """Through transformers' multimodal class, which gives text tokens positions on three axes."""
    settings = with_yarn(small(size, seed=2))
    settings["rope_parameters"] |= {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    reference = make_multimodal(settings, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in saved
    assert saved["tie_word_embeddings"] == DENSE[size]["tie_word_embeddings"]
    model = Qwen3_5.from_directory(tmp_path, dtype="float32", device="cpu")
    assert model.config.module_prefix == "model.language_model."
    tokens = prompt(90, vocab=190)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    assert (served(model, tokens) - expected).abs().max() <= BAR


@sizes
def test_gradients(size: str, tmp_path: Path) -> None:
    """Of an adapter on all linear layers, with a lengthened context for half of the sizes."""
    index = list(DENSE).index(size)
    settings = small(size, seed=3)
    make_flat(with_yarn(settings) if index % 2 else settings, tmp_path / "base")
    model = Qwen3_5.from_directory(tmp_path / "base", dtype="float32", device="cpu")
    peft = make_adapter(tmp_path / "base", tmp_path / "adapter", r=3)
    bound = bind_adapter(adapter_files(tmp_path / "adapter"), model.config, max_rank=8)
    assert {path.rsplit(".", 1)[1] for path in bound.targets} == set(TARGET_MODULES)
    lora = LoraParams.from_bound(bound)
    sft(their_logprobs(peft, DOCUMENTS), torch.zeros(())).backward()
    prefix, suffix = "base_model.model.model.", ".default.weight"
    expected = {
        key.removeprefix(prefix).removesuffix(suffix): parameter.grad
        for key, parameter in peft.named_parameters()
        if parameter.grad is not None
    }
    sft(our_logprobs(model, lora, DOCUMENTS, recompute="selective"), torch.zeros(())).backward()
    assert_equal_gradients(gradients(lora), expected)


@pytest.mark.cuda
def test_a_gpu_decodes_float8_as_a_cpu_does(tmp_path: Path) -> None:
    make_flat(small("qwen3.5-27b", seed=4), tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "float8", (8, 12))
    there, here = (
        Qwen3_5.from_directory(tmp_path / "float8", dtype="bfloat16", device=device).weights
        for device in ("cuda", "cpu")
    )
    for ours, exact in zip(there.layers, here.layers, strict=True):
        for name in ("gate_up", "down"):
            assert torch.equal(getattr(ours, name).dense().cpu(), getattr(exact, name).dense())
        assert torch.equal(ours.mixer.in_proj.dense().cpu(), exact.mixer.in_proj.dense())
        assert torch.equal(ours.mixer.out_proj.dense().cpu(), exact.mixer.out_proj.dense())
