"""Times every sensible cut of `skinny_linear` at the 4B shape, to fill kernels/gpu/linear/skinny_configs.py.

``python -m benchmarks.tuning.linear.sweep [--kinds none,fp8,int4] [--rows 1,8,16,64] [--out FILE]`` on a Hopper GPU.
Each figure is the time of one product in a captured graph of products one after the other, launched as the engine
launches them, over more weights than L2 holds. Every variant's result is checked against torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.tuning.linear import focus
from benchmarks.tuning.linear.cases import (
    NOT_CUTS,
    SHAPES,
    Case,
    Shape,
    Surroundings,
    error_bound,
    reference,
    report,
    weight_of,
)
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig

_L2_TIMES_FOUR = 240e6
_SHARED = 224 * 1024
_REGISTERS = 150


def candidates(shape: Shape, kind: Kind, rows: int) -> Iterator[SkinnyConfig]:
    """The cuts worth timing: enough loads in flight, programs for all multiprocessors, and what fits the chip."""
    if rows == 1 and kind != "int4":
        yield from _vectors(shape, kind)
    if rows <= 16:
        yield from _streams(shape, kind, rows)
    else:
        yield from _dots(shape, kind, rows)


def _vectors(shape: Shape, kind: Kind) -> Iterator[SkinnyConfig]:
    size = 2 if kind == "none" else 1
    for warps in (1, 2, 4, 8):
        block_k = warps * 32 * 16 // size
        chunks = -(-shape.inputs // block_k)
        for block_n in (1, 2, 4, 8, 16):
            # Of the weight alone: 4 bytes a register; and at least a few loads of 16 bytes for a thread.
            held = block_n * chunks * 4
            if 36 <= held <= 100 and chunks <= 10 and block_n >= 1 + shape.swiglu:
                yield SkinnyConfig("vector", block_n, block_k, warps)
                if kind == "none":
                    for tiles in (512, 1024):
                        yield SkinnyConfig("vector", block_n, block_k, warps, prefetch=tiles)


def _streams(shape: Shape, kind: Kind, rows: int) -> Iterator[SkinnyConfig]:
    parts = {"none": 1, "fp8": 2, "int4": 4}[kind]
    for block_n, warps, turns in ((16, 4, 4), (16, 4, 2), (16, 8, 2), (16, 8, 4), (16, 2, 4), (32, 4, 2), (32, 8, 2)):
        block_k = 32 * warps * turns * parts
        steps = -(-shape.inputs // block_k)
        if steps > 20 or steps * block_k > 1.2 * shape.inputs or (rows > 8 and turns > 2 and shape.norm):
            continue
        tile = block_n // 8 * turns * 4
        for ahead in (2, 3, 5):
            if ahead <= steps and 32 <= tile * ahead <= _REGISTERS - 50:
                yield SkinnyConfig("stream", block_n, block_k, warps, stages=ahead)
                if block_n == 16 and warps == 4 and ahead == 2 and kind != "int4":
                    yield SkinnyConfig("stream", block_n, block_k, warps, stages=ahead, prefetch=256)


def _dots(shape: Shape, kind: Kind, rows: int) -> Iterator[SkinnyConfig]:
    block_m = max(16, 1 << (rows - 1).bit_length())
    blocks = ((64, 6), (64, 4), (128, 3)) if kind == "none" else ((128, 3), (128, 4), (128, 6))
    bits = {"none": 16, "fp8": 8, "int4": 4}[kind]
    for block_n, warps in ((64, 4), (128, 8)):
        tiles = -(-shape.outputs // block_n)
        for splits in (1, 2, 4, 8):
            if not (110 <= tiles * splits <= 330 or (splits == 1 and tiles > 110)):
                continue
            for block_k, stages in blocks:
                shared = stages * (block_n * block_k * bits // 8 + block_m * block_k * 2)
                # Two programs on a multiprocessor: there are not as many tiles as would fill whole waves.
                if 2 * shared <= _SHARED and shape.inputs // block_k // splits >= 2:
                    yield SkinnyConfig("dot", block_n, block_k, warps, stages, splits)


def compile_only(cases: list[Case], device: torch.device) -> None:
    """Launches with tensors of no contents (benchmarks/lib/precompile.py runs nothing)."""
    for case in cases:
        around = Surroundings.make(case.shape, case.rows, device)
        # What does not compile is reported by measure(), and must not keep the others from compiling.
        with contextlib.suppress(Exception):
            around.launch(case, weight_of(case.shape, case.kind, device))


def measure(cases: list[Case], device: torch.device, clock: Clock, recorder: Recorder) -> None:
    """Times all cases of one layer and kind; those that do not run or are wrong say so."""
    from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4

    shape, kind = cases[0].shape, cases[0].kind
    dense = torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.bfloat16).mul_(0.02)
    weight = weight_of(shape, kind, device, dense)
    if isinstance(weight, Fp8Weight):
        dense = dequantize_fp8(weight, torch.bfloat16)
    elif isinstance(weight, Int4Weight):
        dense = dequantize_int4(weight, torch.bfloat16)
    parts = (weight,) if isinstance(weight, Tensor) else weight.tensors()
    nbytes = sum(part.numel() * part.element_size() for part in parts)
    copies = [weight]
    while len(copies) * nbytes < _L2_TIMES_FOUR:
        clones = [part.clone() for part in parts]
        copies.append(clones[0] if isinstance(weight, Tensor) else type(weight)(*clones))
    rows: list[tuple[Case, dict[str, Any]]] = []
    arounds = {count: Surroundings.make(shape, count, device) for count in {case.rows for case in cases}}
    expected = {count: reference(next(c for c in cases if c.rows == count), a, dense) for count, a in arounds.items()}
    repeats = -(-12 // len(copies)) if nbytes < 3e8 else 2
    for case in cases:
        if clock.over:
            return
        if recorder.done(case.key):
            continue
        around, row = arounds[case.rows], case.key
        try:
            around.scratch.copy_(around.residual)
            out = around.launch(case, weight).float()
            want = expected[case.rows]
            row["error"] = float((out - want).abs().max() / want.abs().max())
            launches = [partial(around.launch, case, copy) for copy in copies] * repeats
            row["us"] = min(graph_times(launches))
            row["tb_s"] = nbytes / row["us"] / 1e6
        except Exception as error:  # one variant that does not fit must not end the sweep
            row["failed"] = describe(error)
        rows.append((case, row))
        recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.linear.sweep")
    fastest = min((one for one in rows if "us" in one[1]), key=lambda one: one[1]["us"], default=None)
    if fastest is not None:
        case, row = fastest
        launches = [partial(arounds[case.rows].launch, case, copy, pdl=False) for copy in copies] * repeats
        row["us_alone"] = min(graph_times(launches))
    if kind == "none":
        for count, around in arounds.items():
            launches = [partial(torch.mm, around.x, copy.t()) for copy in copies] * repeats
            micros = min(graph_times(launches))
            recorder.add({"layer": shape.name, "kind": kind, "rows": count, "variant": "torch.mm", "us": micros})


def table(rows: list[dict[str, Any]]) -> None:
    """The entries of skinny_configs._MEASURED that these figures make: of each layer, kind and number of rows the
    fastest variant that is right."""
    layers = {shape.name: shape for shape in SHAPES}
    best: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if "us" in row and row["variant"] not in NOT_CUTS and row.get("error", 1) < error_bound(row):
            by_rows = best.setdefault((row["kind"], row["layer"]), {})
            if row["rows"] not in by_rows or row["us"] < by_rows[row["rows"]]["us"]:
                by_rows[row["rows"]] = row
    fields = ("variant", "block_n", "block_k", "warps", "stages", "splits", "prefetch", "stagger", "slots")
    for (kind, layer), by_rows in best.items():
        shape = layers[layer]
        micros = "; ".join(f"{row['us']:.1f}" for _, row in sorted(by_rows.items()))
        print(f"    # {micros}")
        print(f'    ("{kind}", {shape.outputs}, {shape.inputs}): (')
        for count, row in sorted(by_rows.items()):
            print(
                f"        ({count}, SkinnyConfig({', '.join(repr(row[field]) for field in fields if field in row)})),"
            )
        print("    ),")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="none,fp8,int4")
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--layers", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--best", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="most time to spend timing")
    parser.add_argument("--count", action="store_true", help="only say how many variants there are")
    parser.add_argument("--focus", action="store_true", help="a minute for what matters most (focus.py)")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table's entries from such a --out")
    options = parser.parse_args()
    if options.table is not None:
        table(json.loads(options.table.read_text())["rows"])
        return
    if options.focus:
        focus.run(options)
        return
    kinds: list[Kind] = [kind for kind in ("none", "fp8", "int4") if kind in options.kinds.split(",")]
    groups = [
        [
            Case(shape, kind, rows, config)
            for rows in rows_of(options.rows)
            if rows <= 16 or kind != "none"
            for config in candidates(shape, kind, rows)
        ]
        for kind in kinds
        for shape in SHAPES
        if shape.name in options.layers.split(",")
    ]
    cases = [case for group in groups for case in group]
    print(f"{len(cases)} variants", flush=True)
    if options.count:
        return
    # 1 to 8 rows share their kernels.
    different = list({(c.shape, c.kind, max(8, c.rows), c.config): c for c in cases}.values())
    random.Random(0).shuffle(different)
    launches: list[Launch] = [partial(compile_only, different[start::64]) for start in range(64)]
    print(f"compiled in {precompile(launches):.0f} s", flush=True)
    torch.manual_seed(0)
    clock, recorder = Clock(options.seconds), Recorder(options.out, resume=options.resume)
    for group in groups:
        measure(group, torch.device("cuda"), clock, recorder)
    report(recorder.rows, options.best)


def rows_of(text: str) -> list[int]:
    """ "1,2" to [1, 2]."""
    return [int(item) for item in text.split(",")]


if __name__ == "__main__":
    main()
