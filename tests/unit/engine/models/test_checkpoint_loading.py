"""Configuration, strict loading and the digest of checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import CheckpointRejected, InvalidRequest
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.footprint import Formats, Storage, block_bytes, slot_bytes, weight_bytes
from services.engine.models.interface import resolve_dtype
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.registry import load_model, read_config
from tests.parity.reference import Driver, make_checkpoint, prompt

TINY = Path(__file__).parents[4] / "models" / "tiny"

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    make_checkpoint("grouped", path)
    return path


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def load(path: Path) -> Qwen3_5:
    return Qwen3_5.from_directory(path, dtype="float32", device="cpu")


def logits(path: Path) -> torch.Tensor:
    return Driver(load(path)).prefill(prompt(20), None)[1]


def edit_config(path: Path, edit: Edit) -> None:
    file = path / "config.json"
    data = json.loads(file.read_text())
    edit(data)
    file.write_text(json.dumps(data))


def edit_tensors(path: Path, edit: Edit) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


def make_multimodal(path: Path) -> None:
    """What the published weights look like: nested config, other prefix, vision and mtp tensors, two shards."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4)
    renamed["mtp.fc.weight"] = torch.zeros(4, 4)
    names = sorted(renamed)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file = f"model-{shard + 1:05d}-of-00002.safetensors"
        save_file({name: renamed[name].contiguous() for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    data = json.loads((path / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": data, "vision_config": {}, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(nested))


def test_multimodal_checkpoint_is_the_same_model(original: Path, checkpoint: Path) -> None:
    make_multimodal(checkpoint)
    nested, flat = read_config(checkpoint), read_config(original)
    assert nested == dataclasses.replace(flat, module_prefix="model.language_model.")
    assert torch.equal(logits(checkpoint), logits(original))
    assert checkpoint_digest(checkpoint) == checkpoint_digest(original)


def test_layer_types_follow_the_interval(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda data: (data.pop("layer_types"), data.update(full_attention_interval=2)))
    kinds = read_config(checkpoint).layer_types
    assert kinds == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda data: data.pop("hidden_size"), "hidden_size is missing"),
        (lambda data: data.update(hidden_size="48"), "hidden_size must be a positive integer"),
        (lambda data: data.update(rms_norm_eps=0), "rms_norm_eps must be a positive number"),
        (lambda data: data.update(model_type="llama"), "model_type 'llama'"),
        (lambda data: data.update(num_key_value_heads=3), "num_attention_heads must be a multiple"),
        (lambda data: data.update(linear_num_value_heads=3), "linear_num_value_heads must be a multiple"),
        (lambda data: data.update(layer_types=["sliding"] * 4), "layer_types must list"),
        (lambda data: data.update(hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda data: data.update(attention_bias=True), "attention_bias"),
        (lambda data: data.update(attn_output_gate=False), "attn_output_gate"),
        (lambda data: data.update(quantization_config={"bits": 4}), "quantization_config"),
        (lambda data: data["rope_parameters"].update(rope_type="llama3"), "rope_type 'llama3'"),
        (lambda data: data["rope_parameters"].update(partial_rotary_factor=0.3), "rotary dimensions|layer"),
    ],
)
def test_config_errors_name_the_key(checkpoint: Path, edit: Edit, named: str) -> None:
    def apply(data: dict[str, Any]) -> None:
        edit(data)
        if "rotary" in named:
            data["head_dim"] = 18

    edit_config(checkpoint, apply)
    with pytest.raises(CheckpointRejected, match=named):
        load(checkpoint)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_config(checkpoint: Path, content: str | None) -> None:
    file = checkpoint / "config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointRejected, match=r"config\.json"):
        load(checkpoint)


PROJECTION = "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop(PROJECTION), "layers.3.self_attn.q_proj.weight is missing"),
        (lambda tensors: tensors.update({PROJECTION: torch.zeros(4, 48)}), f"{PROJECTION} has shape"),
        (lambda tensors: tensors.update({PROJECTION: torch.zeros(128, 48).int()}), f"{PROJECTION} is I32"),
        (lambda tensors: tensors.update({"model.layers.9.mlp.x": torch.zeros(1)}), "layers.9.mlp.x is not part"),
        (
            lambda tensors: tensors.update({PROJECTION.replace("model.", "model.language_model."): torch.zeros(1)}),
            "twice",
        ),
    ],
)
def test_tensor_errors_name_the_tensor(checkpoint: Path, edit: Edit, named: str) -> None:
    edit_tensors(checkpoint, edit)
    with pytest.raises(CheckpointRejected, match=named):
        load(checkpoint)


@pytest.mark.parametrize("size", [0, 5, 200, -100])
def test_cut_file(checkpoint: Path, size: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    for read in (load, checkpoint_digest):
        with pytest.raises(CheckpointRejected, match=r"model\.safetensors"):
            read(checkpoint)


def test_missing_files(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    for content in ('{"weight_map": {"a": "../secret.safetensors"}}', '{"weight_map": {"a": "x.safetensors"}}', "{}"):
        index.write_text(content)
        with pytest.raises(CheckpointRejected, match=r"index\.json"):
            load(checkpoint)
    index.unlink()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointRejected, match=r"no \*\.safetensors"):
        load(checkpoint)


def test_digest_changes_with_one_bit_and_with_the_config(original: Path, checkpoint: Path) -> None:
    before = checkpoint_digest(original)
    assert checkpoint_digest(checkpoint) == before
    edit_config(checkpoint, lambda data: data.update(rms_norm_eps=2e-6))
    assert checkpoint_digest(checkpoint) != before
    edit_config(checkpoint, lambda data: data.update(rms_norm_eps=1e-6))
    assert checkpoint_digest(checkpoint) == before
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert checkpoint_digest(checkpoint) != before


def test_a_lengthened_context_keeps_the_digest_and_its_adapters(original: Path, checkpoint: Path) -> None:
    before, context = checkpoint_digest(original), read_config(original).max_position_embeddings
    edit_config(checkpoint, lambda data: data.update(max_position_embeddings=8 * context))
    assert checkpoint_digest(checkpoint) != before
    edit_config(checkpoint, lambda data: data.update(original_max_position_embeddings=context))
    assert checkpoint_digest(checkpoint) == before
    assert read_config(checkpoint).max_position_embeddings == 8 * context
    edit_config(checkpoint, lambda data: data.update(original_max_position_embeddings="4k"))
    with pytest.raises(CheckpointRejected, match="original_max_position_embeddings must be a positive integer"):
        checkpoint_digest(checkpoint)


def test_weights_do_not_follow_the_file(checkpoint: Path) -> None:
    model = load(checkpoint)
    before = [tensor.clone() for tensor in (model.weights.embedding, model.weights.layers[0].mixer.in_proj.dense())]
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-file.stat().st_size // 2, 2)
        handle.write(b"\xff" * 4096)
    after = (model.weights.embedding, model.weights.layers[0].mixer.in_proj.dense())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_byte_counts(original: Path) -> None:
    model = load(original)
    cache = model.allocate_cache(3, 8, 5)
    kv = sum(pool.numel() * pool.element_size() for pool in (*cache.keys, *cache.values))
    states = sum(pool.numel() * pool.element_size() for pool in (*cache.conv_states, *cache.recurrent_states))
    assert kv == 3 * block_bytes(model.config, 8, Formats(4))
    assert states == 5 * slot_bytes(model.config, Formats(4))
    assert model.weights.nbytes() > 0


def test_resolve_dtype() -> None:
    assert resolve_dtype("auto", "cpu") == resolve_dtype("float32", "cuda") == torch.float32
    assert resolve_dtype("auto", "cuda") == resolve_dtype("bfloat16", "cpu") == torch.bfloat16
    with pytest.raises(InvalidRequest, match="dtype must be"):
        resolve_dtype("int8", "cpu")


def test_draft_tokens_have_a_copy_of_the_head() -> None:
    """In a quarter of its bytes, of a bfloat16 model with the mtp layer, if it is asked for."""
    storage = Storage(int4_draft_head=True)
    model = load_model(TINY, dtype="bfloat16", device="cpu", storage=storage, mtp=True)
    assert isinstance(model, Qwen3_5)
    assert model.weights.mtp is not None
    copy, head = model.weights.mtp.head, model.head()
    assert copy is not None
    assert copy.nbytes < 0.3 * head.nbytes
    assert (copy.dense() - head).norm() < 0.15 * head.norm()
    assert model.nbytes() == weight_bytes(model.config, Formats(2, storage, head_copy=True, mtp=True))
    for dtype, asked in (("float32", storage), ("bfloat16", Storage())):
        other = load_model(TINY, dtype=dtype, device="cpu", storage=asked, mtp=True)
        assert isinstance(other, Qwen3_5)
        assert other.weights.mtp is not None
        assert other.weights.mtp.head is None
