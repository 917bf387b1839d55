"""Times every sensible cut of the adapter kernels at the 4B shape: `python -m benchmarks.sweep_lora [--out DIR]`.

Fills shrink_config() and expand_config() of kernels/gpu/lora.py. 8 adapters of rank 16, row i uses adapter i mod 8.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.kernel_linear import MATRICES, make_lora
from benchmarks.kernel_timing import Tensors, microseconds
from benchmarks.precompile import precompile
from kernels.gpu.lora_rows import LoraRows

ROWS = (1, 8, 64, 256, 8192)
NAMES = ("in_delta", "down")


def shrink_cuts(rows: int, depth: int, pairs: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Arguments of ShrinkConfig."""
    if rows <= 16:
        for splits in (1, 3) if depth > 4096 else (1, 2):
            block_k = 1 << (-(-depth // splits) - 1).bit_length()
            for block_r in (1, 2, 4):
                for warps in (4, 8):
                    if block_k * block_r // (32 * warps) <= 128:
                        yield 1, block_r, block_k, splits, warps, 1
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    for splits in (1, 2, 4, 8) if rows <= 256 else (1,):
        for block_r in {16, min(64, pairs)}:
            for block_k, stages in ((64, 4), (128, 3), (256, 2)):
                yield block_m, block_r, block_k, splits, 4, stages


def expand_cuts(rows: int) -> Iterator[tuple[int, int, int]]:
    """Arguments of ExpandConfig."""
    for block_m in (64, 128):
        if block_m <= max(16, rows):
            for block_n in (64, 128, 256):
                for warps in (4, 8):
                    yield block_m, block_n, warps


def launch_shrink(t: Tensors, name: str, rows: int, cut: tuple[int, int, int, int, int, int], lora: Any = None) -> Any:
    """One launch as the engine makes it."""
    from kernels.gpu.lora import ShrinkConfig, shrink

    x = t.normal(rows, MATRICES[name][1])
    return partial(shrink, x, lora or make_lora(t, name, rows), config=ShrinkConfig(*cut), pdl=rows <= 64)


def launch_expand(t: Tensors, name: str, rows: int, cut: tuple[int, int, int], lora: Any = None) -> Any:
    from kernels.gpu.lora import ExpandConfig, expand_add

    n, _, ends = MATRICES[name]
    h = t.normal(1, rows, len(ends) * 16, dtype=torch.float32)
    out = t.zeros(rows, n)
    return partial(expand_add, h, lora or make_lora(t, name, rows), out, config=ExpandConfig(*cut), pdl=rows <= 64)


def variants() -> list[tuple[Any, str, int, Any]]:
    found: list[tuple[Any, str, int, Any]] = []
    for name in NAMES:
        _, depth, ends = MATRICES[name]
        for rows in ROWS:
            found += [(launch_shrink, name, rows, cut) for cut in shrink_cuts(rows, depth, 16 * len(ends))]
            if rows > 64:
                found += [(launch_expand, name, rows, cut) for cut in expand_cuts(rows)]
    return found


def _compile(variant: tuple[Any, str, int, Any], device: torch.device) -> None:
    make, *arguments = variant
    # What does not compile is reported when it is timed, and must not keep the others from compiling.
    with contextlib.suppress(Exception):
        make(Tensors(device), *arguments)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="directory for sweep_lora.json")
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    began = time.perf_counter()
    wanted = variants()
    precompile([partial(_compile, variant) for variant in wanted])
    t = Tensors(torch.device("cuda"))
    results: dict[str, list[dict[str, Any]]] = {}
    loras: dict[tuple[str, int], list[LoraRows]] = {}
    for make, name, rows, cut in wanted:
        if time.perf_counter() - began > options.seconds:
            break
        key = f"{make.__name__.removeprefix('launch_')} {name} rows={rows}"
        try:
            if (name, rows) not in loras:
                loras = {(name, rows): [make_lora(t, name, rows) for _ in range(8)]}
            taken = microseconds([make(t, name, rows, cut, lora) for lora in loras[name, rows]], repeats=5)
            results.setdefault(key, []).append({"cut": cut, "us": round(taken, 2)})
        except Exception as error:
            results.setdefault(key, []).append({"cut": cut, "us": 1e9, "failed": str(error)[:200]})
    for key, found in results.items():
        found.sort(key=lambda entry: float(entry["us"]))
        sys.stdout.write(f"{key}: " + "  ".join(f"{entry['cut']} {entry['us']}" for entry in found[:4]) + "\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sweep_lora.json").write_text(json.dumps({**environment(), "results": results}) + "\n")


if __name__ == "__main__":
    main()
