"""The plan of a pod: counted from the config, held against what is really allocated, refused before anything is."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import CheckpointRejected, DoesNotFit, InvalidRequest
from services.common.storage.object_store import ObjectStore
from services.engine.executors.cuda.shapes import verified_rows
from services.engine.models.footprint import (
    Formats,
    Quantization,
    Storage,
    block_bytes,
    float8_training_bytes,
    slot_bytes,
    weight_bytes,
)
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.registry import read_config
from services.engine.models.weights.matrix import Fp8Matrix, Int4Matrix
from services.engine.settings import EngineSettings
from services.pod.device import Device
from services.pod.engine import build_engine
from services.pod.memory import WAITING_WRITES, footprint, formats, plan, state_slots
from tests.parity.reference import BASE, CONFIGS, make_checkpoint

GIB = 1024**3
TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
H200 = Device("cuda", "NVIDIA H200", (9, 0))
A100 = Device("cuda", "NVIDIA A100", (8, 0))
BF16 = torch.bfloat16
QWEN_4B = Qwen3_5Config.from_dict(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
)


QWEN_35B = Qwen3_5MoeConfig.from_dict(
    {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
)


def settings(**given: object) -> EngineSettings:
    """Of a checkpoint of plain floats: with_quantization() has filled in none."""
    return EngineSettings.model_validate({"quantization": "none", "teacher_quantization": "none"} | given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_counts_what_the_loader_allocates(name: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    model = Qwen3_5.from_directory(tmp_path, dtype=dtype, device="cpu")
    stored = formats(model.config, settings(), model.dtype, Device("cpu"))
    assert weight_bytes(model.config, stored) == model.weights.nbytes()
    cache = model.allocate_cache(3, 8, 5)
    kv = sum(pool.numel() * pool.element_size() for pool in (*cache.keys, *cache.values))
    states = sum(pool.numel() * pool.element_size() for pool in (*cache.conv_states, *cache.recurrent_states))
    assert kv == 3 * block_bytes(model.config, 8, stored)
    assert states == 5 * slot_bytes(model.config, stored)


@pytest.mark.parametrize("kv_float8", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("waiting_writes", [0, 8])
def test_counts_what_the_gpu_caches_take(kv_float8: bool, state_dtype: torch.dtype, waiting_writes: int) -> None:
    from services.engine.models.device_batch import DeviceCache

    config = read_config(TINY)
    cache = DeviceCache.allocate(
        config,
        BF16,
        torch.device("cpu"),
        num_blocks=3,
        block_size=16,
        num_slots=5,
        kv_dtype=torch.float8_e4m3fn if kv_float8 else None,
        state_dtype=state_dtype,
        waiting_writes=waiting_writes,
    )
    stored = Formats(2, kv_float8=kv_float8, state_itemsize=state_dtype.itemsize, waiting_writes=waiting_writes)
    pages = [(page.keys, page.values, page.key_scales, page.value_scales) for page in cache.pages]
    assert sum(x.nbytes for page in pages for x in page if x is not None) == 3 * block_bytes(config, 16, stored)
    assert sum(pool.nbytes for pool in cache.state_pools()) == 5 * slot_bytes(config, stored)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_counts_what_quantizing_leaves(quantization: Quantization) -> None:
    kept = Storage(quantization, float8_head=True)
    model = Qwen3_5.from_directory(TINY, dtype="bfloat16", device="cpu", storage=kept)
    assert weight_bytes(model.config, Formats(2, kept)) == model.weights.nbytes()
    assert isinstance(model.weights.head, Fp8Matrix)
    assert isinstance(model.weights.layers[0].gate_up, Fp8Matrix if quantization == "fp8" else Int4Matrix)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_counts_the_mtp_layer(quantization: Quantization) -> None:
    from services.engine.models.device_batch import DeviceCache
    from tests.parity.fused_models import TINY as SMALL
    from tests.parity.fused_models import random_model

    config = replace(SMALL, hidden_size=128, intermediate_size=128, linear_value_dim=64, num_heads=8)
    model = random_model(config, torch.float32, quantization=quantization, mtp=True)
    stored = Formats(4, Storage(quantization, float8_head=quantization != "none"), mtp=True)
    assert weight_bytes(config, stored) == model.weights.nbytes()
    cache = model.allocate_cache(3, 8, 5)
    kv = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert kv == 3 * block_bytes(config, 8, stored)
    device_cache = DeviceCache.allocate(
        config, torch.float32, model.device, num_blocks=3, block_size=8, num_slots=5, draft_layers=1
    )
    assert sum(page.keys.nbytes + page.values.nbytes for page in device_cache.pages) == kv


def test_speculation_takes_rows_and_no_states() -> None:
    plain, mtp = (settings(speculative=kind).for_device("cuda") for kind in ("none", "mtp"))
    assert state_slots(mtp) == state_slots(plain)
    assert formats(QWEN_4B, mtp, BF16, H200).mtp
    assert formats(QWEN_4B, mtp, BF16, H200).waiting_writes == formats(QWEN_4B, plain, BF16, H200).waiting_writes > 0
    few, few_mtp = (
        footprint(QWEN_4B, settings(max_num_seqs=8, speculative=kind).for_device("cuda"), BF16, H200)
        for kind in ("none", "mtp")
    )
    assert few_mtp.sampler == 5 * few.sampler, "each of 8 sequences has five rows at most"
    many, many_mtp = (
        footprint(QWEN_4B, settings(max_num_seqs=256, speculative=kind).for_device("cuda"), BF16, H200)
        for kind in ("none", "mtp")
    )
    assert many_mtp.sampler == many.sampler, "of 32 at most, together fewer than 256"
    inputs = verified_rows(256, 4) * 24 * 8192 * 2
    more = many_mtp.workspace - many.workspace
    assert inputs <= more < 4 * inputs, "of the convolutions, until it is known which rows count"
    with_layer, without = (footprint(QWEN_4B, given, BF16, H200) for given in (mtp, plain))
    head = 248320 * 2560 * (0.5 + 3 / 128)
    assert with_layer.weights - without.weights == pytest.approx(241e6 + head, rel=0.01), "and an int4 copy of the head"
    assert with_layer.block == without.block * 9 // 8


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_groups_must_divide_the_shapes(quantization: Quantization) -> None:
    config = Qwen3_5Config.from_dict({"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6} | BASE)
    with pytest.raises(InvalidRequest, match=rf"{quantization} needs inputs in multiples of 128, layers\.0\..* has 48"):
        Storage(quantization).check(config)
    with pytest.raises(
        InvalidRequest, match=r"TEMPER_TRAIN_FLOAT8 needs inputs in multiples of 128, layers\.0\..* has 48"
    ):
        float8_training_bytes(config, Formats(2))


def test_the_published_shape() -> None:
    assert QWEN_4B.parameters() == 4_205_751_296
    plain = footprint(QWEN_4B, settings().for_device("cuda"), BF16, H200)
    assert plain.weights == pytest.approx(8.41e9, rel=1e-3)
    assert plain.block == 16 * 32 * 1024
    assert plain.slot == pytest.approx((49.1 + 4.63) * 2**20, rel=1e-3)


def test_quantized_sizes() -> None:
    def weights(**given: object) -> float:
        return footprint(QWEN_4B, settings(**given).for_device("cuda"), BF16, H200).weights / 1e9

    # Layers 3.57 G numbers; embedding bf16 1.27 GB; head fp8 0.64 GB beside it.
    assert weights(quantization="fp8") == pytest.approx(3.57 + 1.27 + 0.64, abs=0.02)
    assert weights(quantization="int4") == pytest.approx(3.57 * (0.5 + 3 / 128) + 1.27 + 0.64, abs=0.02)

    def copies(**given: object) -> float:
        return footprint(QWEN_4B, settings(**given).for_device("cuda"), BF16, H200).copies / 1e9

    # A byte a number in each direction; an fp8 model has one of them, and prompts may have it.
    assert copies() == copies(train_float8=True, trainer=False) == 0, "nobody trains"
    assert copies(train_float8=True) == pytest.approx(2 * 3.57, abs=0.02)
    assert copies(train_float8=True, quantization="fp8") == pytest.approx(3.57, abs=0.02)
    assert copies(prefill_float8="all") == pytest.approx(3.57, abs=0.02)
    assert copies(prefill_float8="mlp") == pytest.approx(32 * 3 * 2560 * 9216 / 1e9, abs=0.02)
    for choice in ("all", "mlp:0-15"):
        assert copies(prefill_float8=choice, train_float8=True) == copies(train_float8=True), "shared"
    half = footprint(QWEN_4B, settings(kv_cache_dtype="fp8", state_dtype="bfloat16").for_device("cuda"), BF16, H200)
    assert half.block == 16 * 8 * 2 * 4 * (256 + 4)
    assert half.slot == pytest.approx((25.1 + 4.63) * 2**20, rel=1e-3)


@pytest.mark.parametrize(
    ("quantization", "weights", "least_tokens"), [("fp8", 35.2e9, 600_000), ("int4", 19.2e9, 900_000)]
)
def test_a_mixture_of_experts_leaves_room_for_kv_on_an_80_gb_card(
    quantization: str, weights: float, least_tokens: int
) -> None:
    assert QWEN_35B.parameters() == pytest.approx(34.66e9, rel=1e-3)
    chosen, made = plan(QWEN_35B, settings(quantization=quantization), BF16, H200, 79 * GIB)
    assert made.weights == pytest.approx(weights, rel=0.01)
    assert chosen.max_num_seqs >= 192
    assert made.capacity_tokens >= least_tokens
    assert made.training > GIB


def test_copies_are_a_part_of_the_plan_and_of_what_is_said_where_it_does_not_fit() -> None:
    chosen, made = plan(QWEN_4B, settings(prefill_float8="all"), BF16, H200, 24 * GIB)
    _, without = plan(QWEN_4B, settings(), BF16, H200, 24 * GIB)
    assert chosen.prefill_float8_rows == 1024
    assert made.parts()["copies"] == pytest.approx(3.57e9, rel=0.01)
    assert without.parts()["copies"] == 0
    assert made.kv < without.kv
    with pytest.raises(DoesNotFit, match=r"copies +3\.3. GiB(.|\n)*TEMPER_PREFILL_FLOAT8=none \(float8 copies"):
        plan(QWEN_4B, settings(prefill_float8="all"), BF16, H200, 12 * GIB)


def test_prompts_that_no_step_holds_enough_of_are_refused() -> None:
    for device, kind, rows in ((H200, "cuda", 1024), (Device("cpu"), "cpu", 64)):
        given = settings(prefill_float8="mlp", token_budget=rows, max_num_seqs=4)
        assert plan(QWEN_4B, given, BF16, device, 140 * GIB)[0].for_device(kind).prefill_float8_rows == rows
        with pytest.raises(InvalidRequest, match=f"ROWS={rows} is above the {rows - 1} tokens of a step") as caught:
            plan(QWEN_4B, given.model_copy(update={"token_budget": rows - 1}), BF16, device, 140 * GIB)
        assert caught.value.param == "prefill_float8_rows"


def test_int4_keeps_the_head_where_there_is_no_float8() -> None:
    assert formats(QWEN_4B, settings(quantization="int4"), BF16, H200).storage.float8_head
    assert not formats(QWEN_4B, settings(quantization="int4"), BF16, A100).storage.float8_head


def test_a_large_card_gets_the_defaults() -> None:
    chosen, made = plan(QWEN_4B, settings(), BF16, H200, 139 * GIB)
    assert (chosen.max_num_seqs, chosen.token_budget) == (256, 8192)
    assert made.total <= 0.9 * 139 * GIB
    assert made.model_len(QWEN_4B.max_position_embeddings) == 262144


@pytest.mark.parametrize(("gib", "quantization"), [(24, "none"), (24, "fp8"), (16, "int4"), (32, "none")])
def test_a_smaller_card_runs_fewer_sequences(gib: int, quantization: str) -> None:
    chosen, made = plan(QWEN_4B, settings(quantization=quantization), BF16, H200, gib * GIB)
    assert 4 <= chosen.max_num_seqs < 256
    assert made.total <= 0.9 * gib * GIB
    assert made.states == state_slots(chosen) * slot_bytes(QWEN_4B, Formats(2, waiting_writes=WAITING_WRITES))
    assert made.capacity_tokens >= 16384


def test_what_does_not_fit_is_refused_with_the_plan() -> None:
    with pytest.raises(DoesNotFit, match=r"(?s)weights +7\.83 GiB.*workspace.*states.*kv.*budget +7\.20 GiB"):
        plan(QWEN_4B, settings(), BF16, H200, 8 * GIB)
    with pytest.raises(DoesNotFit, match=r"lacks.*max_num_seqs"):
        plan(QWEN_4B, settings(max_num_seqs=4096), BF16, H200, 139 * GIB)


def test_what_does_not_fit_is_told_what_to_change() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(QWEN_4B, settings(), BF16, H200, 8 * GIB)
    message = refused.value.message
    assert "engine.env:\n  TEMPER_QUANTIZATION=fp8 (weights 5.11 GiB instead of 7.83 GiB)\n" in message
    assert re.search(r"TEMPER_QUANTIZATION=int4 \(weights \d\.\d\d GiB instead of 7\.83 GiB\)", message)
    assert "TEMPER_MEMORY_FRACTION (now 0.9 of the 8.00 GiB that are free)" in message
    for name in re.findall(r"TEMPER_[A-Z_]+", message):
        assert name.removeprefix("TEMPER_").lower() in EngineSettings.model_fields, name
    assert "TEMPER_MAX_NUM_SEQS" not in message, "it is down to one already"
    assert message.endswith("or a GPU with more memory or a larger MIG slice: engine.resources in the chart")

    given = {"max_num_seqs": 4096, "train_memory_bytes": 20 * GIB, "quantization": "int4"}
    with pytest.raises(DoesNotFit) as asked_too_much:
        plan(QWEN_4B, settings(**given), BF16, H200, 139 * GIB)
    message = asked_too_much.value.message
    assert "TEMPER_QUANTIZATION" not in message, "there is nothing smaller"
    assert re.search(r"TEMPER_MAX_NUM_SEQS \(now 4096, a sequence's state takes [\d.]+ MiB\)", message)
    assert "TEMPER_TRAIN_MEMORY_BYTES (now 20.00 GiB)" in message

    with pytest.raises(DoesNotFit, match="TEMPER_QUANTIZATION=int4") as without_fp8:
        plan(QWEN_4B, settings(), BF16, A100, 8 * GIB)
    assert "fp8" not in without_fp8.value.message
    with pytest.raises(DoesNotFit, match=r"more memory for the container: engine\.resources"):
        plan(QWEN_4B, settings(), torch.float32, Device("cpu"), 8 * GIB)


def test_a_context_over_the_plan_is_refused() -> None:
    _, made = plan(QWEN_4B, settings(num_blocks=1001), BF16, H200, 139 * GIB)
    assert made.model_len(262144, 16001) == 16001
    with pytest.raises(DoesNotFit, match=r"max_model_len 16002 is over 1000 KV blocks"):
        made.model_len(262144, 16002)


def without_weights(path: Path) -> Path:
    """The tiny model's directory before its weights have arrived."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path / name)
    return path


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"memory_fraction": 1e-7}, DoesNotFit, r"(?s)lacks.*weights +\d+.*budget"),
        ({"max_model_len": 200_000}, DoesNotFit, "max_model_len 200000 is over the checkpoint's context"),
        ({"quantization": "fp8"}, InvalidRequest, "TEMPER_QUANTIZATION=fp8 needs a GPU"),
        ({}, CheckpointRejected, "no .*safetensors"),
    ],
)
def test_an_engine_is_refused_before_weights_are_read(
    given: dict[str, object], error: type[Exception], says: str, tmp_path: Path
) -> None:
    chosen = settings(model=without_weights(tmp_path), device="cpu", **given)
    with pytest.raises(error, match=says):
        build_engine(chosen, AdapterRegistry(ObjectStore(chosen), "test"), None)


def test_settings_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("services.pod.parts.loaded.prefill_alignment", lambda settings: 64)
    chosen = settings(model=without_weights(tmp_path), device="cpu", mixed_prefill_tokens=63)
    with pytest.raises(InvalidRequest, match="settings: mixed_prefill_tokens must be at least 65"):
        build_engine(chosen, AdapterRegistry(ObjectStore(chosen), "test"), None)


def test_a_small_card_serves_and_trains() -> None:
    """A modest job gets its memory, although that is more than a quarter of what the model leaves on 24 GB."""
    chosen, made = plan(QWEN_4B, settings(), BF16, Device("cuda", "L4", (8, 9)), 22 * GIB)
    assert made.training > 1.2 * GIB
    assert made.kv >= made.training - GIB // 16
    assert made.total <= made.budget
    assert chosen.max_num_seqs >= 16


def test_who_does_not_train_gives_kv_the_memory() -> None:
    _, trains = plan(QWEN_4B, settings(), BF16, H200, 80 * GIB)
    _, serves = plan(QWEN_4B, settings(trainer=False), BF16, H200, 80 * GIB)
    assert serves.training == 0
    assert serves.kv > trains.kv + 0.9 * trains.training
