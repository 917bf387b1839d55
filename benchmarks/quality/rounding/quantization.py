"""Cost of quantization in quality: `python -m benchmarks.quality.rounding.quantization [--engine] [--json FILE]`.

Two figures for each way to store weights, KV and states:
- perplexity of models/tiny on the replies of held-out conversations of its recipe (trained weights);
- error of the logits of a random model of the 4B shape, relative to a float32 computation: for each prompt the logits
  of some tokens, their mean taken off, in the Euclidean norm. Each of its layers adds a little, as in a trained model,
  but its weights are Gaussian, without outliers: read it beside the error of bf16 itself.

Without --engine the torch forward runs with the stored weights multiplied out, on any machine; with it the engine's own
kernels run (on a GPU).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.lib.checkpoints.float8 import convert
from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import TINY, config_of, write
from benchmarks.lib.recorder import describe
from benchmarks.quality.rounding.scorers import EngineScorer, Mode, Query, TorchScorer
from models.tiny.recipe.data import END, SKILLS, chat_template, held_out_items, prompt_text
from services.engine.models.footprint import Storage
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.prompts import PRODUCTS, PromptProducts

MODES = (
    Mode(),
    Mode(quantization="fp8"),
    Mode(quantization="int4"),
    Mode(kv_cache_dtype="fp8"),
    Mode(quantization="fp8", kv_cache_dtype="fp8"),
    Mode(float8_checkpoint=True),
    Mode(quantization="fp8", float8_checkpoint=True),
    Mode(quantization="int4", float8_checkpoint=True),
    *(Mode(prefill_float8=choice) for choice in ("all", *PRODUCTS)),
)
ENGINE_MODES = (*MODES, Mode(state_dtype="bfloat16"))
Score = Callable[[Sequence[Query]], list[float]]


def held_out_queries(count: int) -> list[Query]:
    """Every token of the replies to ``count`` held-out items a skill."""
    tokenizer, template = Tokenizer.from_file(str(TINY / "tokenizer.json")), chat_template()
    queries: list[Query] = []
    for skill in SKILLS:
        for item in held_out_items(skill, count):
            prompt = tokenizer.encode(prompt_text(item, template)).ids
            tokens = prompt + tokenizer.encode(item.completion() + END).ids
            queries += [Query(tuple(tokens[:at]), tokens[at]) for at in range(len(prompt), len(tokens))]
    return queries


def random_queries(vocab_size: int, prompts: int, length: int, tokens: int) -> list[Query]:
    """``tokens`` candidates behind each of some random prompts."""
    rng = random.Random(0)
    queries: list[Query] = []
    for _ in range(prompts):
        prefix = tuple(rng.randrange(vocab_size) for _ in range(length))
        queries += [Query(prefix, token) for token in rng.sample(range(vocab_size), tokens)]
    return queries


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def relative_error(logprobs: Sequence[float], reference: Sequence[float], tokens: int) -> float:
    """Relative error of the logits of each prompt's ``tokens`` candidates, which a log-probability is up to a
    constant."""
    mine, truth = (torch.tensor(values, dtype=torch.float64).view(-1, tokens) for values in (logprobs, reference))
    mine, truth = (values - values.mean(1, keepdim=True) for values in (mine, truth))
    return float((mine - truth).norm() / truth.norm())


def torch_score(model: Path, mode: Mode, dtype: str, device: torch.device) -> Score:
    """The torch forward in one mode."""
    prompts = PromptProducts.parse(mode.prefill_float8)
    kept = Storage(mode.quantization, float8_head=mode.quantization != "none", prompts=prompts)
    loaded = Qwen3_5.from_directory(model, dtype=dtype, device=device, storage=kept)
    return TorchScorer(loaded, float8_kv=mode.kv_cache_dtype == "fp8").score


def score(model: Path, queries: Sequence[Query], mode: Mode, *, engine: bool, device: torch.device) -> list[float]:
    """Log-probabilities of the queries in one mode."""
    sys.stderr.write(f"{model.name}: {mode.name}\n")
    try:
        if not engine:
            return torch_score(model, mode, "bfloat16", device)(queries)
        with EngineScorer(model, mode) as scorer:
            return scorer.score(queries)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def report(
    held_out: Sequence[Query],
    modes: Sequence[Mode],
    *,
    layers: int | None,
    vocab_size: int | None,
    engine: bool,
    device: torch.device,
    seconds: float,
    save: Callable[[dict[str, dict[str, Any]]], None],
) -> None:
    """Mode → perplexity of the tiny model and logit error of the random one; "float32" is the torch forward with the
    weights as they are.

    Args:
        seconds: no mode starts after this.
        save: called with all figures so far after each mode.
    """
    end = time.monotonic() + seconds
    tokens = 64
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        config = config_of("qwen3.5-4b", layers, vocab_size)
        directory = Path(scratch) / "random"
        write(directory, config, gentle=True)
        queries = random_queries(config["vocab_size"], prompts=8, length=160, tokens=tokens)
        plain, truth = (
            torch_score(model, Mode(), "float32", device)(asked)
            for model, asked in ((TINY, held_out), (directory, queries))
        )
        models = {False: (TINY, directory), True: (Path(scratch) / "tiny-fp8", Path(scratch) / "random-fp8")}
        if any(mode.float8_checkpoint for mode in modes):
            for plain_model, float8_model in zip(*models.values(), strict=True):
                convert(plain_model, float8_model)
        figures["float32"] = {"tiny_perplexity": round(perplexity(plain), 5), "logit_error": 0.0}
        save(figures)
        for mode in modes:
            if time.monotonic() > end:
                sys.stderr.write(f"no time left for {mode.name}\n")
                break
            row = figures[mode.name] = {}
            try:
                tiny = score(models[mode.float8_checkpoint][0], held_out, mode, engine=engine, device=device)
                row["tiny_perplexity"] = round(perplexity(tiny), 5)
                mine = score(models[mode.float8_checkpoint][1], queries, mode, engine=engine, device=device)
                row["logit_error"] = round(relative_error(mine, truth, tokens), 5)
            except Exception as error:  # the other modes' figures are still wanted
                row["failed"] = describe(error)
            save(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="store_true", help="through the engine's kernels")
    names = [mode.name for mode in ENGINE_MODES]
    parser.add_argument("--modes", nargs="+", choices=names, default=names, metavar="MODE", help=", ".join(names))
    parser.add_argument("--items", type=int, default=20, help="held-out conversations a skill")
    parser.add_argument("--layers", type=int, help="of the random model; default: all on a GPU, 4 on a CPU")
    parser.add_argument("--vocab-size", type=int, help="default: all on a GPU, 16384 on a CPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no mode after this")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    only_warnings()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = device.type == "cpu"
    layers, vocab_size = options.layers or (4 if small else None), options.vocab_size or (16384 if small else None)
    held_out = held_out_queries(options.items)
    modes = [mode for mode in (ENGINE_MODES if options.engine else MODES) if mode.name in options.modes]
    result = environment() | {
        "path": "engine" if options.engine else "torch",
        "device": device.type,
        "held_out_tokens": len(held_out),
        "random_model": {"shape": "qwen3.5-4b", "layers": layers, "vocab_size": vocab_size},
    }

    def save(figures: dict[str, dict[str, Any]]) -> None:
        result["modes"] = figures
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    report(
        held_out,
        modes,
        layers=layers,
        vocab_size=vocab_size,
        engine=options.engine,
        device=device,
        seconds=options.seconds,
        save=save,
    )
    sys.stderr.write(f"{'stored as':32}{'perplexity, tiny':>18}{'logit error, 4B shape':>24}\n")
    for name, row in result["modes"].items():
        if "failed" in row:
            sys.stderr.write(f"{name:32} failed: {row['failed']}\n")
        else:
            sys.stderr.write(f"{name:32}{row['tiny_perplexity']:18.4f}{row['logit_error']:24.4f}\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
