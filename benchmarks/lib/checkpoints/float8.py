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

from safetensors.torch import load_file, save_file
from torch import Tensor

from services.forge.quantization import BLOCK, is_quantized, quantization_config, to_float8


def converted(tensors: Mapping[str, Tensor], block: tuple[int, int] | None = BLOCK) -> dict[str, Tensor]:
    """Tensors of a shard with the matrices of linear layers in float8."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantized(name, tuple(tensor.shape)):
            made[name], made[f"{name}_scale_inv"] = to_float8(tensor, block)
        else:
            made[name] = tensor
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
    config["quantization_config"] = quantization_config(("lm_head", "model.language_model.embed_tokens"), block)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    convert(options.source, options.target)


if __name__ == "__main__":
    main()
