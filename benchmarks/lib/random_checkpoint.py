"""Checkpoints of real shapes with random weights: speed does not depend on the weights.

`python -m benchmarks.lib.random_checkpoint DIR [--shape qwen3.5-4b] [--layers N]` writes one shard a layer, so that no
more than a layer is in memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.checkpoints.family import SHAPES as SHAPES
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.registry import parse_config

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_MIXED = 0.5
"""Typical size of a number that enters a projection back into the residual stream."""


def config_of(shape: str, layers: int | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """config.json of a shape of the family, with fewer layers or a smaller vocabulary if asked for."""
    data = dict(SHAPES[shape])
    data["num_hidden_layers"] = layers or data["num_hidden_layers"]
    data["vocab_size"] = vocab_size or data["vocab_size"]
    return data


def family_config(data: Mapping[str, Any]) -> Qwen3_5Config:
    """Config of config_of()."""
    config = parse_config(data)
    if not isinstance(config, Qwen3_5Config):
        raise TypeError(f"{data['architectures']} is not of the family")
    return config


def random_tensors(
    config: Qwen3_5Config, seed: int, device: torch.device, *, gentle: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Name → bfloat16 tensor on the CPU, layer by layer; logits are of order one, decays from fast to slow.

    Args:
        gentle: all layers together add about as much as the embedding gives, each a little, as in a trained model.
            Otherwise each layer nearly replaces what came before, and an error grows from layer to layer.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * scale

    embedding = 1.2 * config.hidden_size**-0.5
    # The mtp layer comes last, so that the rest is the same with and without it.
    for name, shape in (config.tensor_shapes() | config.mtp_shapes()).items():
        full = name if name == "lm_head.weight" or name.startswith("mtp.") else f"model.{name}"
        if name.endswith("A_log"):
            tensor = torch.rand(shape, generator=generator, device=device) * 5.5 - 4.0
        elif name.endswith("dt_bias"):
            tensor = torch.rand(shape, generator=generator, device=device) * 4.0 - 3.0
        elif name.endswith("linear_attn.norm.weight"):
            tensor = 1 + normal(shape, 0.1)
        elif "norm" in name:
            tensor = normal(shape, 0.1)
        elif "conv1d" in name:
            tensor = normal(shape, 0.5)
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            tensor = normal(shape, embedding)
        elif gentle and name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensor = normal(shape, embedding * (2 * config.num_layers) ** -0.5 / _MIXED * shape[-1] ** -0.5)
        else:
            tensor = normal(shape, 0.7 * shape[-1] ** -0.5)
        yield full, tensor.to(torch.bfloat16).cpu()


def without_weights(directory: Path, data: dict[str, Any]) -> Path:
    """The directory of config_of() with config.json and the tiny model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(data, indent=1) + "\n")
    for name in _COPIED:
        shutil.copy(TINY / name, directory / name)
    return directory


def write(directory: Path, data: dict[str, Any], seed: int = 0, *, gentle: bool = False) -> None:
    """Writes config.json, the tiny model's tokenizer and the weights.

    Args:
        data: config_of().
        gentle: see random_tensors().
    """
    without_weights(directory, data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = random_tensors(family_config(data), seed, device, gentle=gentle)
    weight_map: dict[str, str] = {}
    for part, group in groupby(tensors, key=lambda item: ".".join(item[0].split(".")[:3])):
        file = f"{part.replace('.', '-')}.safetensors"
        shard = dict(group)
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # engines in other processes count what is free
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that name a model: what checkpoint() is given."""
    parser.add_argument(
        "--model", default="models/tiny", help=f"directory, or one of {', '.join(SHAPES)} with --random"
    )
    parser.add_argument("--random", action="store_true", help="--model names a shape: random weights")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"), help="for random checkpoints")


def check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where they contradict each other."""
    if options.random != (options.model in SHAPES):
        parser.error(f"--random goes with the name of a shape ({', '.join(SHAPES)}), not with a directory")


def checkpoint(name: str, scratch: Path, *, gentle: bool = False) -> Path:
    """The directory of a model: itself, or for the name of a shape a random checkpoint, written once to ``scratch``.

    Args:
        gentle: see benchmarks.lib.random_checkpoint; with a head of its own.
    """
    if name not in SHAPES:
        return Path(name)
    directory = scratch / (f"{name}-gentle" if gentle else name)
    if not (directory / "model.safetensors.index.json").exists():
        changes = {"tie_word_embeddings": False} if gentle else {}
        write(directory, config_of(name) | changes, gentle=gentle)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.directory, config_of(options.shape, options.layers), options.seed)


if __name__ == "__main__":
    main()
