"""Checkpoints with a mixture of experts: config, both ways of storing experts, adapters, and how large they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.errors import AdapterRejected, CheckpointRejected, InvalidRequest
from services.common.jobs import LoraSettings
from services.engine.models.footprint import Formats, Quantization, Storage, weight_bytes
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.moe_config import DOWN, GATE_UP, Qwen3_5MoeConfig, separate_experts
from services.engine.models.registry import read_config
from tests.parity.reference import BASE, CONFIGS, Driver, make_checkpoint, prompt

SMALL = {"model_type": "qwen3_5_moe_text", "rms_norm_eps": 1e-6} | BASE | CONFIGS["experts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    make_checkpoint("experts", path)
    return path


def rewritten(source: Path, target: Path, *, single: bool) -> dict[str, Tensor]:
    """Tensors of a checkpoint with a tensor for each expert, or one for all, which were written to ``target``."""
    tensors = load_file(source / "model.safetensors")
    config = read_config(source)
    for name, shape in config.tensor_shapes().items():
        names = [f"model.{each}" for each in separate_experts(name, shape)]
        if not names:
            continue
        whole = tensors.pop(f"model.{name}") if f"model.{name}" in tensors else None
        parts = [tensors.pop(each) for each in names] if whole is None else list(whole.view(len(names), -1, shape[2]))
        if single:
            tensors |= {each: part.clone() for each, part in zip(names, parts, strict=True)}
        else:
            tensors[f"model.{name}"] = torch.cat(parts).view(shape)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors")
    return tensors


def loaded(path: Path) -> Qwen3_5:
    return Qwen3_5.from_directory(path, dtype="float32", device="cpu")


def test_experts_are_read_one_by_one_or_all_together(checkpoint: Path, tmp_path: Path) -> None:
    tokens = prompt(30)
    expected = Driver(loaded(checkpoint)).prefill(tokens, None)[1]
    for single in (True, False):
        tensors = rewritten(checkpoint, tmp_path, single=single)
        assert ("model.layers.0.mlp.experts.11.down_proj.weight" in tensors) == single
        assert torch.equal(Driver(loaded(tmp_path)).prefill(tokens, None)[1], expected)


@pytest.mark.parametrize(
    ("single", "name"),
    [(True, f"model.layers.2.{GATE_UP.rsplit('.', 1)[0]}.7.up_proj.weight"), (False, f"model.layers.2.{DOWN}")],
)
def test_a_missing_expert_is_named(checkpoint: Path, tmp_path: Path, single: bool, name: str) -> None:
    tensors = rewritten(checkpoint, tmp_path, single=single)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointRejected, match=name.removeprefix("model.") + " is missing"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13, of num_experts=12"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"model_type": "qwen3_moe"}, "neither qwen3_5_moe nor qwen3_5_moe_text"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(change: dict[str, Any], says: str) -> None:
    assert Qwen3_5MoeConfig.from_dict(SMALL | {"mlp_only_layers": []}).expert_size == 36
    with pytest.raises(CheckpointRejected, match=says):
        Qwen3_5MoeConfig.from_dict(SMALL | change)


def test_a_multimodal_checkpoint_has_the_same_text_model() -> None:
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": SMALL}
    config = Qwen3_5MoeConfig.from_dict(whole)
    assert config.module_prefix == "model.language_model."
    assert config.tensor_shapes() == Qwen3_5MoeConfig.from_dict(SMALL).tensor_shapes()


def test_adapters_change_the_shared_expert_and_no_other(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    lora = LoraParams.create(config, LoraSettings(rank=2))
    mlp = {path.removeprefix("layers.0.mlp.") for path in lora.targets if path.startswith("layers.0.mlp.")}
    assert mlp == {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"}
    one = LoraParams.create(config, LoraSettings(target_modules=["layers.3.mlp.shared_expert.up_proj"]))
    assert set(one.targets) == {"layers.3.mlp.shared_expert.up_proj"}
    for name in ("gate", "layers.0.mlp.experts.0.up_proj", "layers.0.mlp.up_proj"):
        with pytest.raises(ValueError if name != "layers.0.mlp.up_proj" else InvalidRequest, match="no linear layer"):
            LoraParams.create(config, LoraSettings(target_modules=[name]))
    files = lora.to_files("test")
    settings = json.loads(files["adapter_config.json"])
    for module in ("experts.3.up_proj", "gate", "shared_expert_gate"):
        path = f"model.layers.0.mlp.{module}"
        settings["target_modules"] = [*settings["target_modules"], path]
        with pytest.raises(AdapterRejected, match="experts and what chooses among them take no adapters"):
            bind_adapter(files | with_tensor(files, path, settings), config, max_rank=8)


def with_tensor(files: dict[str, bytes], path: str, settings: dict[str, Any]) -> dict[str, bytes]:
    from safetensors.torch import load, save

    tensors = load(files["adapter_model.safetensors"])
    tensors[f"base_model.model.{path}.lora_A.weight"] = torch.zeros(2, 48)
    return {"adapter_model.safetensors": save(tensors), "adapter_config.json": json.dumps(settings).encode()}


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_weights_are_as_many_bytes_as_were_counted(quantization: Quantization, tmp_path: Path) -> None:
    """With the mtp layer, whose experts stand one by one in published checkpoints."""
    sizes = {"hidden_size": 128, "head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 1}
    sizes |= {"layer_types": ["linear_attention"], "shared_expert_intermediate_size": 256, "moe_intermediate_size": 128}
    data = SMALL | sizes | {"num_experts": 4}
    config = Qwen3_5MoeConfig.from_dict(data)
    first = {f"mtp.layers.0.mlp.experts.0.{name}_proj.weight" for name in ("gate", "down")}
    shapes = config.as_stored(config.mtp_shapes(), first)
    assert shapes["mtp.layers.0.mlp.experts.3.down_proj.weight"] == (128, 128)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in (config.tensor_shapes() | shapes).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(data))
    kept = Storage(quantization)
    model = Qwen3_5.from_directory(tmp_path, dtype="bfloat16", device="cpu", storage=kept, mtp=True)
    assert weight_bytes(config, Formats(2, kept, mtp=True)) == model.weights.nbytes()
    experts = model.weights.mtp.layers[0].experts
    assert experts is not None
    exact = tensors["mtp.layers.0.mlp.experts.2.down_proj.weight"]
    rows = slice(2 * 128, 3 * 128)
    assert torch.equal(experts.down.part(rows), experts.down.dense()[rows])
    assert (experts.down.part(rows) - exact).norm() < {"none": 0.01, "fp8": 0.05, "int4": 0.2}[
        quantization
    ] * exact.norm()


def test_float8_experts_are_read_with_their_scales(tmp_path: Path) -> None:
    """As published: each expert's matrices with a scale for 128 x 128 numbers."""
    data = SMALL | {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "hidden_size": 128, "num_experts": 3}
    data |= {"head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 128}
    config = Qwen3_5MoeConfig.from_dict(data)
    first = {f"layers.0.mlp.experts.0.{name}_proj.weight" for name in ("gate", "down")}
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in config.as_stored(config.tensor_shapes(), first).items()}
    stored = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        scale = torch.rand(1, 1) + 0.5
        stored[name] = tensors[name].to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        tensors[name] = stored[name].float() * scale
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(data | {"quantization_config": quantized}))
    save_file(stored, tmp_path / "model.safetensors")
    experts = loaded(tmp_path).weights.layers[0].experts
    assert experts is not None
    gate_up = torch.cat([tensors[f"layers.0.mlp.experts.2.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(experts.gate_up.part(slice(2 * 256, 3 * 256)), gate_up)
    assert torch.equal(
        experts.down.dense(), torch.cat([tensors[f"layers.0.mlp.experts.{n}.down_proj.weight"] for n in range(3)])
    )


def test_groups_must_divide_experts() -> None:
    config = Qwen3_5MoeConfig.from_dict(SMALL | {"hidden_size": 128, "head_dim": 32, "linear_value_head_dim": 32})
    with pytest.raises(InvalidRequest, match=r"of 128, layers\.0\.mlp.* has"):
        Storage("fp8").check(config)
