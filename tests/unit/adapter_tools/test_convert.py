"""Both forms of PEFT's keys: each loads in its class, there and back is the same, and nothing unknown passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from services.adapter_tools.convert import Form, convert, form_of
from services.common.errors import AdapterRejected, InvalidRequest
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.registry import read_config
from tests.unit.adapter_tools.adapters import adapter

TOKENS = torch.tensor([[3, 17, 250, 99, 5, 5, 301, 7]])


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> tuple[Any, Any]:
    """The same text model in the class for text and in the one for text and images."""
    text = Qwen3_5ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    multimodal = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=True)
    )
    missing = multimodal.model.language_model.load_state_dict(text.model.state_dict(), strict=True)
    assert not missing.missing_keys
    multimodal.tie_weights()
    return text, multimodal.float().eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def with_adapter(model: Any, files: dict[str, bytes], directory: Path) -> torch.Tensor:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    loaded = PeftModel.from_pretrained(model, directory).eval()
    found = logits(loaded)
    loaded.unload()
    return found


def from_peft(model: Any, directory: Path, **fields: Any) -> dict[str, bytes]:
    """An adapter that PEFT itself writes."""
    torch.manual_seed(4)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj", "in_proj_qkv"], **fields}
    peft = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    peft.save_pretrained(directory)
    peft.unload()
    return {name: (directory / name).read_bytes() for name in (WEIGHTS_FILE, CONFIG_FILE)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 7}, "alpha_pattern": {"up_proj": 3}, "use_rslora": True},
        {"target_modules": r".*layers\.(1|2)\..*(q_proj|up_proj)"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
        {"target_modules": ["layers.1.mlp.up_proj", "layers.1.self_attn.v_proj"]},
        {"exclude_modules": ["layers.2.mlp.up_proj"]},
    ],
)
def test_each_form_gives_its_class_the_same_logits(both: tuple[Any, Any], tmp_path: Path, fields: Any) -> None:
    text, multimodal = both
    original = from_peft(text, tmp_path / "peft", **fields)
    assert form_of(original[WEIGHTS_FILE]) == "text"
    wanted = with_adapter(text, original, tmp_path / "a")
    assert float((wanted - logits(text)).abs().max()) > 1e-2
    there = convert(original, "multimodal")
    assert form_of(there[WEIGHTS_FILE]) == "multimodal"
    assert float((with_adapter(multimodal, there, tmp_path / "b") - wanted).abs().max()) < 1e-5
    back = convert(there, "text")
    assert float((with_adapter(text, back, tmp_path / "c") - wanted).abs().max()) < 1e-6
    before, after = load(original[WEIGHTS_FILE]), load(back[WEIGHTS_FILE])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", ["text", "multimodal"])
def test_what_temper_publishes_loads_in_either_class(
    both: tuple[Any, Any], checkpoint: Path, tmp_path: Path, form: Form
) -> None:
    config = read_config(checkpoint)
    ours = adapter(config, rank=3)
    wanted = with_adapter(both[0], ours, tmp_path / "a")
    converted = convert(ours, form, config)
    assert float((with_adapter(both[form == "multimodal"], converted, tmp_path / "b") - wanted).abs().max()) < 1e-5
    one, two = (bind_adapter(files, config, max_rank=8) for files in (ours, converted))
    assert one.targets.keys() == two.targets.keys()
    assert {target.scale for target in two.targets.values()} == {target.scale for target in one.targets.values()}
    assert json.loads(converted[CONFIG_FILE])["target_modules"] == sorted(TARGET_MODULES)


def changed(files: dict[str, bytes], change: Any) -> dict[str, bytes]:
    tensors = load(files[WEIGHTS_FILE])
    change(tensors)
    return {**files, WEIGHTS_FILE: save(tensors)}


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.__setitem__("base_model.model.lm_head.lora_A.weight", t[A].clone()), "lm_head"),
        (lambda t: t.__setitem__(A.replace("q_proj", "mystery"), t[A].clone()), "mystery"),
        (lambda t: t.__setitem__(A.replace("lora_A", "lora_magnitude_vector"), t[A].clone()), "magnitude"),
        (
            lambda t: t.__setitem__(A.replace("model.layers", "model.language_model.layers"), t[A].clone()),
            "two classes",
        ),
        (lambda t: t.pop(A), "q_proj.lora_A.weight is missing"),
        (lambda t: t.__setitem__(A, t[A][:2].clone()), "rank 4"),
        (lambda t: t.__setitem__(A, t[A].to(torch.int32)), "int32"),
        (lambda t: [t.pop(key) for key in list(t) if "down_proj" in key], "down_proj"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_nothing_unknown_missing_or_twice(checkpoint: Path, change: Any, named: str) -> None:
    files = adapter(read_config(checkpoint))
    with pytest.raises(AdapterRejected, match=named):
        convert(changed(files, change), "multimodal")


def test_with_the_base_every_tensor_is_bound(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    files = adapter(config, modules=["up_proj"])
    fewer = changed(files, lambda t: [t.pop(key) for key in list(t) if "layers.3" in key])
    assert convert(fewer, "multimodal"), "nothing says how many layers there are"
    with pytest.raises(AdapterRejected, match=r"layers\.3\.mlp\.up_proj"):
        convert(fewer, "multimodal", config)


def test_what_is_no_adapter(checkpoint: Path) -> None:
    files = adapter(read_config(checkpoint))
    with pytest.raises(InvalidRequest, match="text, multimodal"):
        convert(files, "onnx")  # type: ignore[arg-type]
    with pytest.raises(AdapterRejected, match="corrupt"):
        convert({**files, WEIGHTS_FILE: files[WEIGHTS_FILE][:-3]}, "text")
    with pytest.raises(AdapterRejected, match=CONFIG_FILE):
        convert({WEIGHTS_FILE: files[WEIGHTS_FILE]}, "text")
    settings = {**json.loads(files[CONFIG_FILE]), "use_dora": True}
    with pytest.raises(AdapterRejected, match="use_dora"):
        convert({**files, CONFIG_FILE: json.dumps(settings).encode()}, "text")
