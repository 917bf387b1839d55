"""Compaction: what stays has the same bits, transformers loads it, and it computes what the masked model does."""

from __future__ import annotations

import json
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.adapter_tools import output
from services.common.errors import CheckpointRejected, InvalidRequest
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.registry import read_config
from services.forge.compaction import Base, compact, compacted, plan
from services.forge.cut import Cut, CutFile
from tests.parity.reference import make_checkpoint
from tests.training_support import write_checkpoint
from tests.unit.forge.models import (
    ALONE,
    BAR,
    TINY,
    cut_to,
    make_cut,
    masked,
    our_logits,
    reference_logits,
    rename,
    untie,
)

TINY_CUT: dict[str, tuple[int, ...]] = {
    "kv_groups": (1,),
    "key_heads": (0,),
    "mlp_channels": tuple(range(384)),
    "layers": (0, 1, 2, 3, 4, 7),
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A well-conditioned random model of three DeltaNet layers and one of attention."""
    directory = tmp_path_factory.mktemp("base")
    make_checkpoint("grouped", directory)
    if request.param == "untied":
        untie(directory)
    return directory


@pytest.mark.parametrize("units", ALONE)
def test_transformers_loads_it_and_agrees_with_us_and_with_masks(tmp_path: Path, checkpoint: Path, units: str) -> None:
    with ExitStack() as stack:
        base = Base(checkpoint, stack)
        cut = make_cut(base, ALONE[units])
        compact(base, cut, tmp_path / "out")
        masked(checkpoint, tmp_path / "masked", cut, base)
    theirs = reference_logits(tmp_path / "out")
    assert float((theirs - our_logits(tmp_path / "out")).abs().max()) <= BAR
    assert float((theirs - reference_logits(tmp_path / "masked")).abs().max()) <= BAR
    assert float((theirs - reference_logits(checkpoint)).abs().max()) > 0.01, "something was cut"


def test_the_tiny_model_with_everything_cut_at_once(tmp_path: Path) -> None:
    cut_to(TINY, tmp_path / "out", TINY_CUT)
    theirs = reference_logits(tmp_path / "out")
    assert float((theirs - our_logits(tmp_path / "out", mtp=True)).abs().max()) <= BAR
    config = read_config(tmp_path / "out")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (2, 1, 64, 384)
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert data["layer_types"] == ["linear_attention"] * 3 + ["full_attention", "linear_attention", "full_attention"]
    assert (data["linear_num_key_heads"], data["linear_num_value_heads"]) == (1, 2)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert checkpoint_digest(tmp_path / "out") != checkpoint_digest(TINY), "so its adapters are refused"


def test_what_stays_has_the_same_bits(tmp_path: Path) -> None:
    cut_to(TINY, tmp_path / "out", TINY_CUT)
    before = load_file(TINY / "model.safetensors") | load_file(TINY / "model-mtp.safetensors")
    after = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    old = before["model.layers.7.self_attn.q_proj.weight"]  # the last layer that stays keeps the other group
    new = after["model.layers.5.self_attn.q_proj.weight"]
    assert new.dtype == old.dtype
    assert torch.equal(new, old[:256])
    assert torch.equal(after["model.layers.0.linear_attn.A_log"], before["model.layers.0.linear_attn.A_log"][:2])
    down = before["mtp.layers.0.mlp.down_proj.weight"]
    assert torch.equal(after["mtp.layers.0.mlp.down_proj.weight"], down[:, :384])
    assert torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_multimodal_checkpoint_in_shards_keeps_its_names(tmp_path: Path, checkpoint: Path) -> None:
    rename(checkpoint, tmp_path / "multimodal", vision=True)
    cut_to(tmp_path / "multimodal", tmp_path / "out", ALONE["together"])
    cut_to(checkpoint, tmp_path / "text", ALONE["together"])
    tensors = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert "model.visual.blocks.0.attn.qkv.weight" in tensors
    assert "model.language_model.layers.1.self_attn.q_proj.weight" in tensors
    assert torch.equal(our_logits(tmp_path / "out"), our_logits(tmp_path / "text"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["num_hidden_layers"] == 2


def test_the_whole_model_is_a_cut(tmp_path: Path) -> None:
    cut_to(TINY, tmp_path / "out", {})
    assert checkpoint_digest(tmp_path / "out") == checkpoint_digest(TINY)


def test_the_plan_says_what_is_written(tmp_path: Path) -> None:
    with ExitStack() as stack:
        base = Base(TINY, stack)
        cut = make_cut(base, TINY_CUT)
        said = plan(base, compacted(base, cut), cut)
        compact(base, cut, tmp_path / "out", max_shard_bytes=2**20)
    tensors = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert said.parameters_after == sum(tensor.numel() for tensor in tensors.values())
    assert said.bytes_after == sum(tensor.nbytes for tensor in tensors.values())
    assert said.parameters == 5_796_784 + 787_840
    assert said.shape["layers"] == (8, 6)
    assert said.shape["value_heads"] == (4, 2)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"layers": (3, 7)}, "at least one linear_attention layer must stay"),
        ({"layers": (0, 8)}, "from 0 to 7"),
        ({"layers": (3, 2)}, "ascending"),
        ({"kv_groups": (2,)}, "from 0 to 1"),
        ({"kv_groups": ()}, "at least one"),
        ({"mlp_channels": tuple(range(100))}, "only multiples of 16 can"),
    ],
)
def test_an_impossible_cut_is_refused(tmp_path: Path, kept: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        cut_to(TINY, tmp_path / "out", kept)
    assert list(tmp_path.iterdir()) == []


def test_layers_lose_as_many_units(tmp_path: Path) -> None:
    uneven: dict[Any, dict[str, tuple[int, ...]]] = {
        "kv_groups": {"layers.3": (0,), "layers.7": (0, 1), "mtp.layers.0": (0,)}
    }
    with ExitStack() as stack:
        base = Base(TINY, stack)
        with pytest.raises(InvalidRequest, match=r"every layer keeps as many, got \[1, 2\]"):
            compact(base, Cut(tuple(range(8)), uneven), tmp_path / "out")
        del uneven["kv_groups"]["mtp.layers.0"]
        with pytest.raises(InvalidRequest, match=r"name the layers .*mtp\.layers\.0"):
            compact(base, Cut(tuple(range(8)), uneven), tmp_path / "out")


def test_experts_and_float8_cannot_be_cut(tmp_path: Path, tokenizer_files: dict[str, bytes]) -> None:
    experts = write_checkpoint(tmp_path / "experts", tokenizer_files, num_experts=4, num_experts_per_tok=2)
    with pytest.raises(InvalidRequest, match="experts"):
        cut_to(experts, tmp_path / "out", {})
    float8 = tmp_path / "float8"
    cut_to(TINY, float8, {})
    config = json.loads((float8 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (float8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="take the bfloat16 checkpoint"):
        cut_to(float8, tmp_path / "out", {})


def test_a_wrong_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointRejected, match=r"config\.json"):
        cut_to(tmp_path, tmp_path / "out", {})
    broken = tmp_path / "broken"
    cut_to(checkpoint, broken, {})
    file = broken / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.self_attn.k_proj.weight"] = tensors["model.layers.3.self_attn.k_proj.weight"][:8].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointRejected, match=r"layers\.3\.self_attn\.k_proj.*asks for \[32, 48\]"):
        cut_to(broken, tmp_path / "out", {})


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 0, 70 * 2**20)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidRequest, match=r"needs \d+\.\d MiB.*has 70\.0 MiB free"):
        cut_to(TINY, tmp_path / "out", TINY_CUT)
    assert list(tmp_path.iterdir()) == []


def test_a_cut_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        written = CutFile(make_cut(Base(TINY, stack), TINY_CUT), "d" * 64, {"method": "weights"})
    written.write(tmp_path / "cut.json")
    assert CutFile.read(tmp_path / "cut.json") == written
    with pytest.raises(InvalidRequest, match="is there already"):
        written.write(tmp_path / "cut.json")
    (tmp_path / "cut.json").write_text('{"format": 1, "layers": [1.5]}')
    with pytest.raises(InvalidRequest, match="no cut of"):
        CutFile.read(tmp_path / "cut.json")
