"""Adapters in serving give PEFT's logits, mixed in one batch, and survive the way through files unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from services.common.jobs import LoraSettings
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.lora.trainable import LoraParams
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.conftest import Pair
from tests.parity.reference import BAR, CONFIGS, Driver, prompt, reference_logits

ALL = list(TARGET_MODULES)
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True, "r": 6},
    "patterns": {
        "target_modules": ALL,
        "rank_pattern": {"layers.0.mlp.down_proj": 2, "in_proj_z": 7},
        "alpha_pattern": {"layers.1.*.out_proj": 3, "q_proj": 16},
    },
    "some-modules": {"target_modules": ["q_proj", "in_proj_b", "up_proj"]},
    "some-layers": {"target_modules": ALL, "layers_to_transform": [1, 3]},
    "expression": {"target_modules": r".*\.(linear_attn|mlp)\..*proj.*"},
    "lookaround": {
        "target_modules": r"^(model(?=\.).*\.(q_proj|up_proj|in_proj_z))$",
        "exclude_modules": r".*\.layers\.(?!0)\d\.mlp\..*",
        "alpha_pattern": {r"layers\.(?!1\.)\d+\..*_proj": 32},
        "rank_pattern": {r"(?<=self_attn\.)q_proj": 2},
    },
    "of-the-other-class": {
        "rank_pattern": {r"model\.language_model\..*": 8},
        "alpha_pattern": {".*language_model.*": 64, "model.language_model.layers.1.self_attn.q_proj": 64},
        "exclude_modules": r"model\.language_model\.layers\.1\..*",
    },
    "layers-pattern": {
        "target_modules": ["up_proj", "model.layers.0.mlp.down_proj"],
        "layers_to_transform": 1,
        "layers_pattern": ["blocks", "layers"],
    },
}


@torch.no_grad()
def peft_logits(peft: PeftModel, tokens: list[int]) -> torch.Tensor:
    return peft(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_adapters_and_the_base_in_one_batch(pairs: dict[str, Pair], name: str, tmp_path: Path) -> None:
    pair = pairs[name]
    first = make_adapter(pair.path, tmp_path / "a", seed=1, r=3)
    second = make_adapter(pair.path, tmp_path / "b", seed=2, r=5, lora_alpha=4)
    slots = LoraSlots(pair.model.config, 4, 8, torch.float32, "cpu")
    for slot, path in ((3, tmp_path / "a"), (1, tmp_path / "b")):
        slots.load(slot, bind_adapter(adapter_files(path), pair.model.config, max_rank=8))
    driver = Driver(pair.model, lora=slots)
    texts = {slot: prompt(40 + slot) for slot in (0, 1, 3)}
    expected = {
        0: reference_logits(pair.reference, texts[0]),
        1: peft_logits(second, texts[1]),
        3: peft_logits(first, texts[3]),
    }
    # Alone, so that every row has the adapter; then together, decoding, and with a prefill beside it.
    for slot, tokens in texts.items():
        place, logits = driver.prefill(tokens, 16, adapter=slot)
        assert float((logits - expected[slot]).abs().max()) <= BAR
        driver.close(place)
    places = {slot: driver.open(slot) for slot in texts}
    parts = {
        slot: [logits]
        for slot, logits in zip(texts, driver.run([(places[s], texts[s][:30]) for s in texts]), strict=True)
    }
    for step in range(30, 36):
        for slot, logits in zip(
            texts, driver.run([(places[s], texts[s][step : step + 1]) for s in texts]), strict=True
        ):
            parts[slot].append(logits)
    joining = driver.open(3)
    late = driver.run([(places[s], texts[s][36:37]) for s in texts] + [(joining, texts[3])])
    for slot, logits in zip(texts, late, strict=False):
        parts[slot].append(logits)
        assert float((torch.cat(parts[slot]) - expected[slot][:37]).abs().max()) <= BAR, slot
    assert float((late[-1] - expected[3]).abs().max()) <= BAR


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plain_lora(pairs: dict[str, Pair], kind: str, tmp_path: Path) -> None:
    pair = pairs["grouped"]
    peft = make_adapter(pair.path, tmp_path, **KINDS[kind])
    slots = LoraSlots(pair.model.config, 2, 8, torch.float32, "cpu")
    slots.load(1, bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    tokens = prompt(50)
    expected = peft_logits(peft, tokens)
    _, logits = Driver(pair.model, lora=slots).prefill(tokens, 16, adapter=1)
    assert float((logits - expected).abs().max()) <= BAR
    assert float((reference_logits(pair.reference, tokens) - expected).abs().max()) > 0.05


def test_reloaded_and_cleared_slots_leave_nothing_behind(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path / "a", seed=1, r=8)
    peft = make_adapter(pair.path, tmp_path / "b", seed=2, r=2, target_modules=["down_proj"])
    slots = LoraSlots(pair.model.config, 2, 8, torch.float32, "cpu")
    for name in "ab":
        slots.load(1, bind_adapter(adapter_files(tmp_path / name), pair.model.config, max_rank=8))
    tokens = prompt(40)
    driver = Driver(pair.model, lora=slots)
    _, logits = driver.prefill(tokens, None, adapter=1)
    assert float((logits - peft_logits(peft, tokens)).abs().max()) <= BAR
    slots.clear(1)
    _, logits = driver.prefill(tokens, None, adapter=1)
    assert float((logits - reference_logits(pair.reference, tokens)).abs().max()) <= BAR
    with pytest.raises(ValueError, match="slot must be between 1 and 1"):
        slots.clear(0)


@pytest.mark.parametrize("kind", [*KINDS, "new"])
def test_written_files_load_in_peft(pairs: dict[str, Pair], kind: str, tmp_path: Path) -> None:
    """As they are, on the class that the base checkpoint names."""
    pair = pairs["grouped"]
    config = pair.model.config
    if kind == "new":
        params = LoraParams.create(config, LoraSettings(rank=4, alpha=6.0, seed=3))
        with torch.no_grad():
            for name, tensor in params.named_parameters():
                if name.endswith("lora_B"):
                    tensor.normal_(0, 0.1)
    else:
        make_adapter(pair.path, tmp_path / "made", **KINDS[kind])
        params = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path / "made"), config, max_rank=8))
    files = params.to_files("base")
    out = tmp_path / "out"
    out.mkdir()
    for name, data in files.items():
        (out / name).write_bytes(data)
    tensors = load_file(out / "adapter_model.safetensors")

    base = Qwen3_5ForCausalLM.from_pretrained(pair.path, dtype=torch.float32).eval()
    peft = PeftModel.from_pretrained(base, out).eval()
    loaded = [name for name, _ in peft.named_parameters() if "lora_" in name]
    assert len(loaded) == len(tensors)
    bound = bind_adapter(files, config, max_rank=8)
    slots = LoraSlots(config, 2, 8, torch.float32, "cpu")
    slots.load(1, bound)
    tokens = prompt(40)
    _, logits = Driver(pair.model, lora=slots).prefill(tokens, None, adapter=1)
    assert float((logits - peft_logits(peft, tokens)).abs().max()) <= BAR
