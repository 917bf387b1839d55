"""Checkpoints whose matrices are float8 with scales by blocks, by rows or one for all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from benchmarks.lib.checkpoints.float8 import convert
from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import canonical_name, checkpoint_digest
from services.engine.models.config import Float8Scales, read_float8
from services.engine.models.footprint import Formats, Storage, weight_bytes
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.registry import read_config
from services.engine.models.weights.matrix import Fp8Matrix, Matrix
from services.forge.quantization import quantization_config
from tests.parity import reference
from tests.parity.reference import BAR, Driver, make_checkpoint, prompt

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "linear_key_head_dim": 32} | {
    "linear_value_head_dim": 32,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
"""Inputs in multiples of 128, which fp8 and int4 need."""
BLOCKS: dict[str, tuple[int, int] | None] = {"published": (128, 128), "ragged": (24, 40), "rows": None}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of one model: its plain checkpoint, and one for each of BLOCKS."""
    root = tmp_path_factory.mktemp("float8")
    with patch.dict(reference.CONFIGS, wide=WIDE):
        make_checkpoint("wide", root / "plain")
    for name, block in BLOCKS.items():
        convert(root / "plain", root / name, block)
    return {name: root / name for name in ("plain", *BLOCKS)}


@pytest.fixture
def checkpoint(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["published"], tmp_path / "copy"))


def load(path: Path, dtype: str = "float32", **storage: Any) -> Qwen3_5:
    return Qwen3_5.from_directory(path, dtype=dtype, device="cpu", storage=Storage(**storage))


def matrices(model: Qwen3_5) -> Iterator[Matrix]:
    for layer in model.weights.layers:
        yield from (layer.mixer.in_proj, layer.mixer.out_proj, layer.gate_up, layer.down)
        if layer.experts is not None:
            yield from (layer.experts.router, layer.experts.gate_up, layer.experts.down)


def decoded(path: Path, block: tuple[int, int] | None, target: Path) -> Path:
    """The same model as a checkpoint of plain floats: number by number its value times its scale."""
    shutil.copytree(path, target)
    tensors, plain = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            height, width = block or (1, tensor.shape[1])
            row, column = torch.arange(tensor.shape[0]) // height, torch.arange(tensor.shape[1]) // width
            plain[name] = (tensor.double() * scale.double()[row][:, column]).float()
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    save_file(plain, target / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors.index.json").unlink()
    return target


def test_logits_equal_transformers(made: dict[str, Path]) -> None:
    theirs = Qwen3_5ForCausalLM.from_pretrained(made["published"], dtype=torch.float32).eval()
    tokens = prompt(40)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    logits = Driver(load(made["published"])).prefill(tokens, 16)[1]
    plain = Driver(load(made["plain"])).prefill(tokens, 16)[1]
    assert (logits - expected).abs().max() <= BAR
    assert (plain - expected).abs().max() > 100 * BAR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_plain_numbers_are_values_times_scales(made: dict[str, Path], name: str, dtype: str, tmp_path: Path) -> None:
    """Rounded once, to the model's dtype; and int4 is that of these numbers."""
    plain = decoded(made[name], BLOCKS[name], tmp_path / "plain")
    for kept in ({}, {"quantization": "int4", "float8_head": True}):
        for ours, theirs in zip(
            matrices(load(made[name], dtype, **kept)), matrices(load(plain, dtype, **kept)), strict=True
        ):
            assert torch.equal(ours.dense(), theirs.dense())


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(stacked: bool, tmp_path: Path) -> None:
    """Each expert's own matrices, as published, and one tensor of all experts; their last blocks are not whole."""
    block = (16, 20)
    make_checkpoint("experts", tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "float8", block)
    plain = decoded(tmp_path / "float8", block, tmp_path / "decoded")
    if stacked:
        edit_tensors(tmp_path / "float8", stack_experts)
    for ours, theirs in zip(matrices(load(tmp_path / "float8")), matrices(load(plain)), strict=True):
        assert torch.equal(ours.dense(), theirs.dense())


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """All experts' matrices and scales of a layer as one tensor; gate and up end with whole blocks only apart."""
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        for ending in ("", "_scale_inv"):
            down = [tensors.pop(f"{prefix}{expert}.down_proj.weight{ending}") for expert in range(12)]
            tensors[f"{prefix}down_proj{ending}"] = torch.stack(down)


def test_rows_stay_as_they_are_in_fp8(made: dict[str, Path]) -> None:
    exact, stored = load(made["rows"]), load(made["rows"], quantization="fp8")
    for plain, kept in zip(matrices(exact), matrices(stored), strict=True):
        assert isinstance(kept, Fp8Matrix)
        # Of a DeltaNet layer's input the rows of b and a are plain floats, which are rounded here.
        rows = slice(0, exact.config.conv_dim + exact.config.value_size)
        assert torch.equal(plain.dense()[rows], kept.dense()[rows])


def test_blocks_are_rounded_again_in_fp8(made: dict[str, Path]) -> None:
    """Where a row's scales differ: by as much as a checkpoint of plain floats is, and not where a scale is its row's
    largest."""
    plain, exact, stored = load(made["plain"]), load(made["ragged"]), load(made["ragged"], quantization="fp8")
    for true, decoded_once, kept in zip(matrices(plain), matrices(exact), matrices(stored), strict=True):
        checkpoint, twice = decoded_once.dense() - true.dense(), kept.dense() - true.dense()
        assert checkpoint.norm() < 0.03 * true.dense().norm()
        assert twice.norm() < 1.5 * checkpoint.norm()
    scale = load_file(made["ragged"] / "model.safetensors")[SCALE].float().repeat_interleave(24, 0)[:128]
    largest = (scale == scale.amax(1, keepdim=True)).repeat_interleave(40, 1)[:, :256]
    once, again = (model.weights.layers[1].down.dense() for model in (exact, stored))
    assert torch.equal(once[largest], again[largest])
    assert (once == again)[~largest].double().mean() < 0.1


def test_the_plan_counts_what_is_loaded(made: dict[str, Path]) -> None:
    config = read_config(made["published"])
    assert config.float8 == Float8Scales((128, 128))
    kept = Storage("fp8", float8_head=True)
    assert load(made["published"], quantization="fp8", float8_head=True).nbytes() == weight_bytes(
        config, Formats(4, kept)
    )


def test_a_multimodal_checkpoint_with_a_float8_head(made: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((made["published"] / "config.json").read_text())
    quantization = config.pop("quantization_config")
    tensors = load_file(made["published"] / "model.safetensors")
    tensors = {
        (
            f"language_model.{name}"
            if name.startswith("lm_head")
            else name.replace("model.", "language_model.model.", 1)
        ): x
        for name, x in tensors.items()
    }
    head = tensors["language_model.lm_head.weight"]
    tensors["language_model.lm_head.weight"] = (head * 64).to(torch.float8_e4m3fn)
    tensors["language_model.lm_head.weight_scale_inv"] = torch.full((2, 1), 1 / 64)
    save_file(tensors, tmp_path / "model.safetensors")
    nested = {"model_type": "qwen3_5", "text_config": config, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    model, flat = load(tmp_path), load(made["published"])
    assert model.config.module_prefix == "model.language_model."
    assert torch.equal(model.head(), tensors["language_model.lm_head.weight"].float() / 64)
    for ours, theirs in zip(matrices(model), matrices(flat), strict=True):
        assert torch.equal(ours.dense(), theirs.dense())
    assert canonical_name("language_model.lm_head.weight_scale_inv") == "lm_head.weight_scale_inv"


def test_the_digest_covers_scales(checkpoint: Path, made: dict[str, Path]) -> None:
    before = checkpoint_digest(checkpoint)
    assert before == checkpoint_digest(made["published"]) != checkpoint_digest(made["plain"])
    edit_tensors(checkpoint, lambda tensors: tensors[f"{DOWN}_scale_inv"].mul_(2))
    assert checkpoint_digest(checkpoint) != before


DOWN = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{DOWN}_scale_inv"
NORM = "model.norm.weight"
Edit = Callable[[dict[str, Tensor]], Any]


def edit_tensors(path: Path, edit: Edit) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(SCALE), f"{DOWN} is F8_E4M3, and {SCALE} is missing"),
        (lambda t: t.update({SCALE: torch.ones(2, 2)}), rf"{SCALE} has shape \[2, 2\], .*\[128, 256\] needs \[1, 2\]"),
        (lambda t: t.update({SCALE: torch.ones(1, 2, dtype=torch.int32)}), f"{SCALE} is I32: scales must be plain"),
        (lambda t: t.update({SCALE: torch.tensor([[1.0, float("nan")]])}), f"{SCALE} has scales below 0 or not finite"),
        (lambda t: t[SCALE].neg_(), f"{SCALE} has scales below 0 or not finite"),
        (lambda t: t.update({DOWN: torch.zeros(128, 256)}), f"{SCALE} is the scale of {DOWN}, which .* no float8"),
        (lambda t: t.update({DOWN: torch.zeros(128, 256).to(torch.float8_e5m2)}), f"{DOWN} is F8_E5M2: only floats"),
        (lambda t: t.update({NORM: torch.zeros(128).to(torch.float8_e4m3fn)}), f"{NORM} is F8_E4M3: only floats"),
        (lambda t: t.update({f"{NORM}_scale_inv": torch.ones(1)}), f"{NORM}_scale_inv is the scale of {NORM}"),
    ],
)
def test_wrong_scales_are_refused_by_name(checkpoint: Path, edit: Edit, message: str) -> None:
    edit_tensors(checkpoint, edit)
    with pytest.raises(CheckpointRejected, match=message):
        load(checkpoint)


def test_float8_without_quantization_config(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointRejected, match=r"is F8_E4M3, and config\.json has no quantization_config"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported, only .* take the bfloat16 checkpoint"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"weight_block_size": [128]}, r"weight_block_size must be two positive integers, got \[128\]"),
        ({"weight_block_size": [0, 128]}, "two positive integers"),
    ],
)
def test_other_quantizations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointRejected, match=message):
        read_float8({"quantization_config": quantization_config(()) | changes})


def test_a_scale_for_a_whole_matrix() -> None:
    """[], or [1] as some write it."""
    one = read_float8({"quantization_config": {"quant_method": "fp8"}})
    assert one == Float8Scales(None)
    assert one.shapes((4, 3)) == [(4, 1), (4,), (1,), ()]
