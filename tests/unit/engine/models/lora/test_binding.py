"""Adapters bind completely or are refused with the name of the tensor or field at fault."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor

from services.common.errors import AdapterRejected, InvalidRequest
from services.common.jobs import LoraSettings
from services.engine.models.lora.binding import BoundAdapter, bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.targets import TARGET_MODULES
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODEL = Qwen3_5Config(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    layer_types=("linear_attention", "full_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=4,
    linear_value_dim=6,
    conv_kernel=4,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    module_prefix="model.language_model.",
)
KEY = "base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_A.weight"


def files(**settings: Any) -> dict[str, bytes]:
    return LoraParams.create(MODEL, LoraSettings(**({"rank": 4, "alpha": 8.0} | settings))).to_files("base")


def changed(
    source: dict[str, bytes],
    tensors: Callable[[dict[str, Tensor]], Any] | None = None,
    config: dict[str, Any] | None = None,
) -> dict[str, bytes]:
    held = load(source[WEIGHTS])
    if tensors:
        tensors(held)
    return {WEIGHTS: save(held), CONFIG: json.dumps(json.loads(source[CONFIG]) | (config or {})).encode()}


def test_all_linear_layers_bind() -> None:
    bound = bind_adapter(files(), MODEL, max_rank=4)
    assert len(bound.targets) == 8 + 7
    assert bound.target_modules == TARGET_MODULES
    assert (bound.rank, bound.alpha, bound.use_rslora, bound.max_rank) == (4, 8.0, False, 4)
    assert bound.targets["layers.0.linear_attn.in_proj_qkv"].scale == 2.0
    assert bind_adapter(files(use_rslora=True), MODEL, max_rank=4).targets["layers.0.mlp.up_proj"].scale == 4.0


def test_both_key_prefixes_bind() -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("model.language_model.", "model.")] = tensors.pop(key)

    renamed = bind_adapter(changed(files(), rename), MODEL, max_rank=4)
    plain = bind_adapter(files(), MODEL, max_rank=4)
    assert renamed.targets.keys() == plain.targets.keys()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(KEY), f"{KEY} is missing"),
        (lambda t: t.update({KEY: torch.zeros(3, 16)}), f"{KEY} has shape"),
        (lambda t: t.update({KEY: torch.zeros(4, 16, dtype=torch.int32)}), f"{KEY} is torch.int32"),
        (lambda t: t[KEY].fill_(float("nan")), f"{KEY} has values that are not finite"),
        (lambda t: t[KEY].fill_(float("inf")), f"{KEY} has values that are not finite"),
        (lambda t: t[KEY][0, :2].copy_(torch.tensor([float("inf"), -float("inf")])), f"{KEY} has values that are not"),
        (lambda t: t.update({KEY.replace("language_model.", ""): torch.zeros(4, 16)}), "the keys of two classes"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(1)}), "lm_head"),
        (lambda t: t.update({KEY.replace("layers.1", "layers.2"): torch.zeros(4, 16)}), r"layers\.2"),
        (lambda t: t.update({KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(1)}), "magnitude"),
        (lambda t: t.update({KEY.replace("lora_A.weight", "lora_B.bias"): torch.ones(1)}), "bias"),
        (lambda t: t.update({KEY.replace("base_model.model.", ""): t.pop(KEY)}), "binds to no linear layer"),
    ],
)
def test_tensor_errors_name_the_tensor(edit: Callable[[dict[str, Tensor]], Any], named: str) -> None:
    with pytest.raises(AdapterRejected, match=named):
        bind_adapter(changed(files(), edit), MODEL, max_rank=4)


def test_a_sum_that_overflows_is_no_fault_of_its_terms() -> None:
    huge = torch.finfo(torch.float32).max
    bound = bind_adapter(changed(files(), lambda tensors: tensors[KEY].fill_(huge)), MODEL, max_rank=4)
    assert any(bool((target.a == huge).all()) for target in bound.targets.values())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_new": 3}, "something_new"),
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"rank_pattern": {"(": 2}}, "malformed pattern"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern of model.language_model.layers.1.self_attn.q_proj"),
        ({"rank_pattern": {"([a-z_.0-9]+)+!(": 2}}, "malformed pattern"),
        ({"rank_pattern": {f"layer{n}": 2 for n in range(5000)}}, "5000 entries, the limit is 4096"),
        ({"target_modules": "(?!x)y"}, "matches no linear layer"),
        ({"target_modules": "(?!x"}, "target_modules has a malformed pattern"),
        ({"target_modules": "(?<=a*)b"}, "malformed pattern"),
        ({"target_modules": r"(q|k)_proj\1"}, "a backreference"),
        ({"exclude_modules": r"(?(1)a|b)"}, "malformed pattern"),
        ({"exclude_modules": r"(a)?(?(1)b|c)"}, "a condition on a group"),
        ({"alpha_pattern": {"(?>a)b": 2}}, "the pattern .* of alpha_pattern has an atomic group"),
        ({"rank_pattern": {"a++": 2}}, "a possessive quantifier"),
        ({"rank_pattern": {"x" * 2001: 2}}, "over 2000 characters"),
        ({"layers_to_transform": [1], "layers_pattern": "(a+)+"}, "layers_pattern must be names"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
        ({"target_modules": ".*", "layers_to_transform": [1]}, "layers_to_transform needs a list"),
        ({"target_modules": "([a-z_.0-9]+)+!"}, "matches no linear layer"),  # Python's re would take for ever
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": ["lm_head"]}, "matches no linear layer"),
        ({"target_modules": 3}, "target_modules must be"),
        ({"layers_to_transform": ["x"]}, "layers_to_transform"),
    ],
)
def test_config_errors_name_the_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterRejected, match=named):
        bind_adapter(changed(files(), config=config), MODEL, max_rank=4)


def test_rank_over_the_limit() -> None:
    with pytest.raises(AdapterRejected, match="rank 4, over this engine's limit of 3"):
        bind_adapter(files(), MODEL, max_rank=3)
    slots = LoraSlots(MODEL, 2, 2, torch.float32, "cpu")
    with pytest.raises(AdapterRejected, match="rank 4 is over the limit of 2"):
        slots.load(1, bind_adapter(files(), MODEL, max_rank=4))


def test_missing_and_corrupt_files() -> None:
    good = files()
    for name in good:
        with pytest.raises(AdapterRejected, match=f"has no {name}"):
            bind_adapter({key: data for key, data in good.items() if key != name}, MODEL, max_rank=4)
        for data in (b"", b"{", good[name][: len(good[name]) // 2]):
            with pytest.raises(AdapterRejected, match=name):
                bind_adapter(good | {name: data}, MODEL, max_rank=4)
    with pytest.raises(AdapterRejected, match="not a JSON object"):
        bind_adapter(good | {CONFIG: b"[]"}, MODEL, max_rank=4)


def test_a_tensor_named_twice_is_refused() -> None:
    good = files()
    weights = good[WEIGHTS]
    end = 8 + int.from_bytes(weights[:8], "little")
    header = weights[8:end].rstrip()
    key, entry = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    doubled = header[:-1] + b"," + json.dumps(key).encode() + b":" + json.dumps(entry).encode() + b"}"
    twice = len(doubled).to_bytes(8, "little") + doubled + weights[end:]
    with pytest.raises(AdapterRejected, match=f"{key} twice"):
        bind_adapter(good | {WEIGHTS: twice}, MODEL, max_rank=4)


def test_another_base_model_is_refused() -> None:
    other = dataclasses.replace(MODEL, hidden_size=20)
    with pytest.raises(AdapterRejected, match="has shape"):
        bind_adapter(files(), other, max_rank=4)


def test_keys_follow_the_class_of_the_base_checkpoint() -> None:
    text = dataclasses.replace(MODEL, module_prefix="model.")
    files = LoraParams.create(text, LoraSettings(rank=2)).to_files("base")
    keys = load(files["adapter_model.safetensors"]).keys()
    assert all(key.startswith("base_model.model.model.layers.") for key in keys)
    continued = LoraParams.from_bound(bind_adapter(files, MODEL, max_rank=4)).to_files("base")
    moved = load(continued["adapter_model.safetensors"]).keys()
    assert moved == {key.replace("model.layers", "model.language_model.layers") for key in keys}


def test_params_round_trip_through_files_and_state() -> None:
    params = LoraParams.create(MODEL, LoraSettings(rank=3, alpha=5.0, seed=9, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for tensor in params.parameters():
            tensor.normal_()
    again = LoraParams.from_bound(bind_adapter(params.to_files("base"), MODEL, max_rank=4))
    assert again.to_files("base") == params.to_files("base")
    other = LoraParams.create(MODEL, LoraSettings(rank=3, seed=1, target_modules=["q_proj", "up_proj"]))
    other.load_state(params.state())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), params.parameters(), strict=True))
    assert all(tensor.requires_grad and tensor.dtype == torch.float32 for tensor in other.parameters())
    assert (params.rank, params.target_modules) == (3, ("q_proj", "up_proj"))
    assert params.num_parameters() == sum(tensor.numel() for tensor in params.parameters())
    for wrong in ({}, {name: tensor[:1] for name, tensor in params.state().items()}):
        with pytest.raises(ValueError, match=r"adapter|is \["):
            other.load_state(wrong)


def test_new_adapters_are_seeded_and_add_nothing() -> None:
    first, same, other = (LoraParams.create(MODEL, LoraSettings(rank=4, seed=seed)) for seed in (1, 1, 2))
    assert first.to_files("b") == same.to_files("b") != other.to_files("b")
    for target in first.targets.values():
        assert not target.b.any()
        assert float(target.a.detach().abs().max()) <= target.a.shape[1] ** -0.5


def test_unknown_target_modules() -> None:
    for names, says in (
        (["lm_head"], "'lm_head' is no linear layer"),
        (["qproj"], "did you mean 'q_proj'"),
        (["q_proj", "layers.x.mlp.up_proj"], "'layers.x.mlp.up_proj' is no linear layer"),
        ([], "is empty"),
        ("q_proj", "target_modules"),
    ):
        with pytest.raises(ValidationError, match=says):
            LoraSettings(target_modules=names)
    with pytest.raises(InvalidRequest, match=r"layers\.7\.mlp\.up_proj of this model"):
        LoraParams.create(MODEL, LoraSettings(target_modules=["layers.7.mlp.up_proj"]))


def test_target_modules_of_new_adapters() -> None:
    def made(*names: str | None) -> set[str]:
        given = None if names == (None,) else list(names)
        return set(LoraParams.create(MODEL, LoraSettings(target_modules=given)).targets)

    everything = made(None)
    assert len(everything) == 15
    assert made("all-linear") == made("lm_head", "All-Linear") == everything
    assert set(LoraParams.create(MODEL, LoraSettings(target_modules="all-linear")).targets) == everything
    assert made("q_proj", "layers.0.mlp.up_proj") == {"layers.1.self_attn.q_proj", "layers.0.mlp.up_proj"}
    some = LoraParams.create(MODEL, LoraSettings(target_modules=["layers.0.mlp.up_proj", "q_proj"]))
    assert some.target_modules == ("layers.0.mlp.up_proj", "q_proj")
    assert set(bind_adapter(some.to_files("base"), MODEL, max_rank=16).targets) == set(some.targets)


def test_bytes_per_slot_is_what_the_buffers_take() -> None:
    slots = LoraSlots(MODEL, 3, 4, torch.bfloat16, "cpu")
    taken = sum(
        tensor.numel() * tensor.element_size()
        for groups in slots._layers
        for group in groups.values()
        for tensor in (group.a, group.b)
    )
    assert taken == 3 * LoraSlots.bytes_per_slot(MODEL, 4, torch.bfloat16)


def test_a_slot_holds_its_last_adapter_alone() -> None:
    """All of the larger one that came first is gone, in other modules and beyond the smaller one's rank."""

    def bound(rank: int, **settings: Any) -> BoundAdapter:
        made = changed(files(rank=rank, **settings), lambda tensors: [t.normal_() for t in tensors.values()])
        return bind_adapter(made, config=MODEL, max_rank=4)

    def held(slots: LoraSlots) -> list[Tensor]:
        found = [tensor[1] for groups in slots._layers for group in groups.values() for tensor in (group.a, group.b)]
        return [*found, slots._ranks[:, :, 1]]

    torch.manual_seed(0)
    small = bound(2, target_modules=["gate_proj", "q_proj"])
    expected, slots = LoraSlots(MODEL, 2, 4, torch.bfloat16, "cpu"), LoraSlots(MODEL, 2, 4, torch.bfloat16, "cpu")
    expected.load(1, small)
    slots.load(1, bound(4))
    assert all(tensor.any() for tensor in held(slots))
    slots.load(1, small)
    assert all(torch.equal(*pair) for pair in zip(held(slots), held(expected), strict=True))
    slots.clear(1)
    assert not any(tensor.any() for tensor in held(slots))
