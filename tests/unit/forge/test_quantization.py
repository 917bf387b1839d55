"""Float8 of a checkpoint: the published format, which our loader reads."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from services.common.errors import InvalidRequest
from services.engine.models.registry import load_model, read_config
from services.forge.quantization import Quantized
from tests.unit.forge.models import TINY, cut_to, our_logits


def quantize(directory: Path, out: Path) -> Quantized:
    with ExitStack() as stack:
        quantized = Quantized(directory, stack)
        quantized.write(out, max_shard_bytes=2**21)
        return quantized


def test_each_block_has_its_scale_and_small_matrices_stay(tmp_path: Path) -> None:
    planned = quantize(TINY, tmp_path / "out")
    before = load_file(TINY / "model.safetensors") | load_file(TINY / "model-mtp.safetensors")
    after = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert sum(tensor.nbytes for tensor in after.values()) == planned.bytes_after < planned.bytes
    name = "model.layers.3.self_attn.q_proj.weight"
    values, scales = after[name], after[f"{name}_scale_inv"]
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (4, 2)
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (values.float() * wide - before[name].float()).abs()
    assert float((error / wide).max()) <= 16.1, "half a step of e4m3 at its largest numbers"
    for kept in ("model.embed_tokens.weight", "model.layers.0.linear_attn.in_proj_a.weight", "mtp.fc.weight"):
        assert torch.equal(after[kept], before[kept])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"model.embed_tokens", "model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.conv1d"} <= set(
        config["modules_to_not_convert"]
    )
    assert "model.layers.0.mlp.down_proj" not in config["modules_to_not_convert"]
    assert AutoConfig.from_pretrained(tmp_path / "out").quantization_config["weight_block_size"] == [128, 128]


def test_a_cut_model_quantized_says_nearly_the_same(tmp_path: Path) -> None:
    cut_to(TINY, tmp_path / "cut", {"mlp_channels": tuple(range(400))})
    quantize(tmp_path / "cut", tmp_path / "out")
    assert read_config(tmp_path / "out").float8 is not None
    plain, rounded = our_logits(tmp_path / "cut"), our_logits(tmp_path / "out", mtp=True)
    assert torch.cosine_similarity(plain, rounded, dim=-1).mean() > 0.99
    assert not torch.equal(plain, rounded)
    assert load_model(tmp_path / "out", dtype=torch.float32, device="cpu").config.intermediate_size == 400


def test_twice_is_refused(tmp_path: Path) -> None:
    quantize(TINY, tmp_path / "out")
    with pytest.raises(InvalidRequest, match="is quantized already"):
        quantize(tmp_path / "out", tmp_path / "again")
