"""Checkpoints to cut, and what transformers and our forward make of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.engine.models.registry import load_model
from services.forge.compaction import Base, compact
from services.forge.cut import Cut
from services.forge.units import MTP_LAYER, Width, places

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
TOKENS = torch.tensor([3, 17, 250, 99, 5, 5, 301, 7, 42, 11] * 7)
BAR = 2e-4
"""Largest absolute difference of float32 logits."""

ALONE: dict[str, dict[str, Any]] = {
    "kv_groups": {"kv_groups": (1,)},
    "key_heads": {"key_heads": (0,)},
    "mlp_channels": {"mlp_channels": tuple(range(0, 32, 2))},
    "layers": {"layers": (1, 3)},
    "one layer": {"layers": (0, 2, 3)},
}
ALONE["together"] = ALONE["kv_groups"] | ALONE["key_heads"] | ALONE["mlp_channels"] | ALONE["layers"]
"""Units that stay, by kind, the same in each layer but for what vary() does."""


def make_cut(base: Base, kept: Mapping[str, tuple[int, ...]]) -> Cut:
    """Each second layer keeps others than those named."""
    layers = kept.get("layers", tuple(range(base.config.num_layers)))
    widths: dict[Width, dict[str, tuple[int, ...]]] = {}
    for width, units in kept.items():
        if width == "layers":
            continue
        total = {"kv_groups": base.config.num_kv_heads, "key_heads": base.config.linear_key_heads}.get(
            width, base.config.intermediate_size
        )
        left = [f"layers.{index}" for index in layers] + [MTP_LAYER]
        paths = [path for path in left if path in places(base.config, width, mtp=base.mtp)]  # type: ignore[arg-type]
        turned = tuple(sorted(total - 1 - unit for unit in units))
        widths[width] = {path: turned if at % 2 else units for at, path in enumerate(paths)}  # type: ignore[index]
    return Cut(layers, widths)


def cut_to(directory: Path, out: Path, kept: Mapping[str, tuple[int, ...]]) -> Cut:
    with ExitStack() as stack:
        base = Base(directory, stack)
        cut = make_cut(base, kept)
        compact(base, cut, out)
        return cut


def reference_logits(directory: Path) -> Tensor:
    """[T, vocab] float32 of transformers, the directory loaded unchanged."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["mismatched_keys"], report
    assert not report["unexpected_keys"], report
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS[None] % model.config.vocab_size, use_cache=False).logits[0]
    return logits


def our_logits(directory: Path, *, mtp: bool = False) -> Tensor:
    """[T, vocab] float32 of the training forward."""
    model = load_model(directory, dtype=torch.float32, device="cpu", mtp=mtp)
    ids = TOKENS % model.config.vocab_size
    with torch.no_grad():
        return model.logits(model.forward_train(ids, [len(ids)], None, recompute="none", give_way=lambda: None))


def masked(directory: Path, out: Path, cut: Cut, base: Base) -> None:
    """A copy of the checkpoint whose cut units are zero, written here anew, from the model's definition."""
    config = base.config
    shutil.copytree(directory, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            path = name.removeprefix("model.language_model.").removeprefix("model.")
            if not path.startswith("layers."):
                continue
            _, number, inside = path.split(".", 2)
            gone = int(number) not in cut.layers
            if inside == "self_attn.o_proj.weight":
                heads = config.num_heads // config.num_kv_heads
                columns = tensor.view(len(tensor), config.num_kv_heads, heads * config.head_dim)
                _zero(columns, None if gone else cut.of("kv_groups", f"layers.{number}"), gone)
            elif inside == "linear_attn.out_proj.weight":
                columns = tensor.view(len(tensor), config.linear_key_heads, -1)
                _zero(columns, None if gone else cut.of("key_heads", f"layers.{number}"), gone)
            elif inside == "mlp.down_proj.weight":
                _zero(tensor[:, :, None], None if gone else cut.of("mlp_channels", f"layers.{number}"), gone)
        save_file(tensors, file, metadata={"format": "pt"})


def _zero(columns: Tensor, kept: tuple[int, ...] | None, gone: bool) -> None:
    for unit in range(columns.shape[1]):
        if gone or (kept is not None and unit not in kept):
            columns[:, unit] = 0


def rename(directory: Path, out: Path, *, vision: bool) -> None:
    """The same weights as the multimodal class has them, in two shards, with a nested config."""
    out.mkdir()
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    if vision:
        renamed["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(6, 4)
    names = sorted(renamed)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, chosen in halves.items():
        save_file({name: renamed[name] for name in chosen}, out / file_name, metadata={"format": "pt"})
    index = {"weight_map": {name: file_name for file_name, chosen in halves.items() for name in chosen}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.loads((directory / "config.json").read_text())
    text["model_type"] = "qwen3_5_text"
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    nested["tie_word_embeddings"] = text["tie_word_embeddings"]
    (out / "config.json").write_text(json.dumps(nested))


def untie(directory: Path) -> None:
    """Gives a checkpoint a head of its own."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(1).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
