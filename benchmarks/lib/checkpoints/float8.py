"""Float8 checkpoints in the format of the published ones, made from others: what loading them costs is measured without
downloading one.

`python -m benchmarks.lib.checkpoints.float8 SOURCE TARGET` converts a checkpoint directory shard by shard.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.quantize import FP8_MAX

BLOCK = (128, 128)
_KEPT = frozenset({"embed_tokens", "lm_head", "conv1d", "in_proj_a", "in_proj_b", "fc", "gate", "shared_expert_gate"})
"""Modules by their last name that stay plain floats, as in the published checkpoints: small, or sensitive."""


def quantization_config(block: tuple[int, int] | None = BLOCK) -> dict[str, Any]:
    """Entry of config.json."""
    kept = ["lm_head", "model.language_model.embed_tokens"]
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | {"weight_block_size": None if block is None else list(block), "modules_to_not_convert": kept}


def to_float8(weight: Tensor, block: tuple[int, int] | None = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix as values and scales.

    Args:
        weight: [out, in].
        block: rows and columns that share a scale; None: rows have one each.

    Returns:
        [out, in] float8_e4m3fn, and [blocks of rows, blocks of columns] bfloat16.
    """
    height, width = block or (1, weight.shape[1])
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, (height, width), strict=True))
    padded = torch.zeros(rows * height, columns * width)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows, height, columns, width)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    values = (blocks / scale.float()[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)
    return values[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


def converted(tensors: Mapping[str, Tensor], block: tuple[int, int] | None = BLOCK) -> dict[str, Tensor]:
    """Tensors of a shard with the matrices of linear layers in float8."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.split(".")[-2] in _KEPT or ".visual." in name:
            made[name] = tensor
        else:
            made[name], made[f"{name}_scale_inv"] = to_float8(tensor, block)
    return made


def convert(source: Path, target: Path, block: tuple[int, int] | None = BLOCK) -> None:
    """Writes a float8 copy of a checkpoint directory."""
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors = converted(load_file(file), block)
            save_file(tensors, target / file.name)
            weight_map |= dict.fromkeys(tensors, file.name)
        elif file.is_file() and not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(block)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    convert(options.source, options.target)


if __name__ == "__main__":
    main()
