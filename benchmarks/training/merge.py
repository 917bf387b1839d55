"""Merging adapters of a model's shape: `python -m benchmarks.training.merge --matrices 1`.

Random adapters on all linear layers, for each method and number of parents. Speed depends on the numbers only through
how many columns the search for the nearest matrix of a rank takes. Singular values of the parents fall by --decay from
one to the next: with 0.75, as trained ones do, the smaller ones drown in what dropping and trimming add, and directions
of noise must be told apart, which is the slow case; with 1.0 they do not. With --matrices N only so many layers of each
kind of matrix are merged, and the whole is counted up from them.

One JSON line a method and number of parents, written to --out as it comes:

- kinds: by module its shape, how many the model has, median seconds of one, the same of the processor (of all threads;
  what others do on the machine is not in it), relative error of the rank (mean)
- whole_seconds, whole_cpu_seconds: of all matrices, counted up
- peak_gb: on a GPU the most that was allocated beside the parents, 10⁹ bytes; planned_gb: what a job reserves
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import SHAPES, config_of, family_config
from benchmarks.lib.recorder import put_line
from services.adapter_tools.low_rank import Factors
from services.adapter_tools.merge import Weighted, merge_layer, working_bytes
from services.adapter_tools.workshop import Workshop
from services.common.jobs import MergeSettings
from services.engine.models.lora.targets import target_shapes

METHODS = ("weighted", "svd", "ties", "dare_linear", "dare_ties")
DENSITY = {"ties": 0.2, "dare_linear": 0.5, "dare_ties": 0.5}


def random_parents(shape: tuple[int, int], count: int, rank: int, decay: float, seed: int) -> list[Weighted]:
    """Adapters of one layer, of unequal weights."""
    generator = torch.Generator().manual_seed(seed)
    out, width = shape
    sizes = decay ** torch.arange(rank, dtype=torch.float64)
    return [
        Weighted(
            Factors(
                torch.randn(rank, width, generator=generator).double(),
                torch.randn(out, rank, generator=generator).double() * sizes,
            ),
            1.0 / (place + 1),
            place,
        )
        for place in range(count)
    ]


def merge_settings(method: str, parents: int, rank: int) -> MergeSettings:
    """Settings as a job would have them; all but weighted merges are cut to the parents' rank."""
    sources = [{"adapter": f"parent-{place}", "weight": 1.0 / (place + 1)} for place in range(parents)]
    cut = None if method == "weighted" else rank
    return MergeSettings.model_validate(
        {"sources": sources, "method": method, "rank": cut, "density": DENSITY.get(method)}
    )


def measure(options: argparse.Namespace, method: str, parents: int) -> dict[str, Any]:
    """Measures one merge: a line of the result."""
    config = family_config(config_of(options.shape))
    device = torch.device(options.device)
    shop = Workshop(device)
    settings = merge_settings(method, parents, options.rank)
    kinds: dict[str, list[str]] = {}
    for path in target_shapes(config):
        kinds.setdefault(path.split(".", 2)[2], []).append(path)
    found: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for kind, paths in kinds.items():
        shape = target_shapes(config)[paths[0]]
        seconds: list[float] = []
        processor: list[float] = []
        errors: list[float] = []
        for path in [paths[0], *paths][: 1 + (options.matrices or len(paths))]:  # the first is merged twice: a warm-up
            given = random_parents(shape, parents, options.rank, options.decay, len(seconds))
            started, before = time.perf_counter(), time.process_time()
            merged = merge_layer(path, given, settings, 0, shop)
            seconds.append(time.perf_counter() - started)
            processor.append(time.process_time() - before)
            errors.append(merged.error)
        found[kind] = {
            "shape": list(shape),
            "count": len(paths),
            "seconds": round(statistics.median(seconds[1:]), 4),
            "cpu_seconds": round(statistics.median(processor[1:]), 4),
            "error": round(statistics.mean(errors), 5),
        }
    return {
        "method": method,
        "parents": parents,
        "rank": options.rank,
        "decay": options.decay,
        "threads": torch.get_num_threads(),
        "kinds": found,
        "whole_seconds": round(sum(kind["count"] * kind["seconds"] for kind in found.values()), 1),
        "whole_cpu_seconds": round(sum(kind["count"] * kind["cpu_seconds"] for kind in found.values()), 1),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "planned_gb": max(working_bytes(shape, parents, settings, shop) for shape in target_shapes(config).values())
        / 1e9,
    }


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All lines."""
    yield {"environment": environment(), "options": {key: str(value) for key, value in vars(options).items()}}
    for method in options.methods:
        for parents in options.parents:
            yield measure(options, method, parents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help="comma-separated")
    parser.add_argument("--parents", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--decay", type=float, default=0.75, help="of the parents' singular values")
    parser.add_argument("--matrices", type=int, default=None, help="of each kind; all of them if not given")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if unknown := sorted(set(options.methods) - set(METHODS)):
        parser.error(f"no methods: {', '.join(unknown)}; choose from {', '.join(METHODS)}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for line in results(options):
        put_line(line, options.out)


if __name__ == "__main__":
    main()
