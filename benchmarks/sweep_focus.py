"""What decides the speed of 1 to 64 rows, in a minute: the most important cuts first, the result written after each.

Run by ``python -m benchmarks.sweep_linear --focus --out FILE``. Every figure contains what surrounds the product (norm,
activation, residual), whatever the number of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import sweep_linear as sweep
from benchmarks.environment import environment
from benchmarks.precompile import Launch, precompile
from kernels.gpu.skinny_configs import Kind, SkinnyConfig
from services.engine.model.matrix import DenseMatrix, Fp8Matrix
from services.engine.model.residual import Residual

_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ, _HEAD = sweep.SHAPES
_SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor."""
_MULTIPROCESSORS = 132
_LEAST = 3
"""Entries less urgent would not have their turn."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure."""

    urgency: int
    """Lower comes first."""
    shape: sweep.Shape
    kind: Kind
    rows: int
    config: SkinnyConfig | None
    """None: a kernel for each of norm, product and activation, the product torch's or fp8_linear."""

    def key(self) -> dict[str, Any]:
        cut: dict[str, Any] = {"variant": "apart"} if self.config is None else asdict(self.config)
        return {"layer": self.shape.name, "kind": self.kind, "rows": self.rows, **cut}


def entries() -> list[Entry]:
    """All of them, the most important first."""
    found = [entry for entry in (*_dense(), *_fp8(), *_int4()) if entry.urgency <= _LEAST]
    return sorted(found, key=lambda entry: entry.urgency)


def _cuts(shape: sweep.Shape, rows: int, size: int) -> Iterator[tuple[int, SkinnyConfig]]:
    """Cuts of the tma variant whose programs are resident all at once, with as many stages as then fit or half of them;
    and how unlikely each is to win (0 or 1)."""
    for block_n, warps in ((128, 4), (256, 8)) if shape.swiglu else ((64, 4), (128, 4)):
        tiles = -(-shape.outputs // block_n)
        for splits in (1, 2, 3, 4, 6, 8):
            programs = tiles * splits
            if not 72 <= programs <= 330:
                continue
            neighbours = -(-programs // _MULTIPROCESSORS)
            for block_k in (64, 128, 256) if size == 2 else (128, 256):
                steps = -(-shape.inputs // block_k)
                most = (_SHARED // neighbours - 2048) // ((block_n + max(16, rows)) * block_k * size)
                stages = min(most, -(-steps // splits) + 1, 8)
                unlikely = int(
                    -(-steps // splits) * splits > 1.1 * steps or programs < 96 or (block_n == 256 and rows < 64)
                )
                for used in {stages, -(-stages // 2) + 1}:
                    if 2 <= used <= stages:
                        rare = max(unlikely, int(used < stages and block_k == 64))
                        yield rare, SkinnyConfig("tma", block_n, block_k, warps, used, splits)


def _dense() -> Iterator[Entry]:
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        for rows in (16, 64):
            yield Entry(0, shape, "none", rows, None)
            begin = int(rows == 64)
            for unlikely, config in _cuts(shape, rows, 2):
                yield Entry(begin + 3 * unlikely, shape, "none", rows, config)
                if unlikely:
                    continue
                yield Entry(begin + 1, shape, "none", rows, replace(config, stagger=True))
                yield Entry(begin + 2, shape, "none", rows, replace(config, prefetch=512))
                if shape.norm and rows == 16:
                    yield Entry(begin, shape, "none", rows, replace(config, inside=True))
                    yield Entry(begin + 1, shape, "none", rows, replace(config, inside=True, stagger=True))
        yield Entry(1, shape, "none", 16, SkinnyConfig("dot", 64, 64, 4, 6, 1 if shape.norm else 4))
        yield Entry(1, shape, "none", 8, SkinnyConfig("stream", 16, 256 if shape.norm else 512, 4, 3))
    for rows in (16, 64):
        for splits in (1, 2):
            yield Entry(3, _HEAD, "none", rows, SkinnyConfig("tma", 128 * splits, 128 // splits, 4 * splits, 3))
        yield Entry(3, _HEAD, "none", rows, None)
    for block_n, block_k, warps in ((8, 512, 2), (16, 512, 2), (16, 1024, 4)):
        yield Entry(3, _HEAD, "none", 1, SkinnyConfig("vector", block_n, block_k, warps))


def _fp8() -> Iterator[Entry]:
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        yield Entry(1, shape, "fp8", 64, None)
        for unlikely, config in _cuts(shape, 64, 1):
            yield Entry(2 + 2 * unlikely, shape, "fp8", 64, config)
            if not unlikely:
                yield Entry(3, shape, "fp8", 64, replace(config, stagger=True))
        yield from _streams(shape, "fp8", 8, ((16, 512, 4, 3),))


def _int4() -> Iterator[Entry]:
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        cuts = ((16, 1024, 4, 2), (16, 512, 2, 4), (16, 512, 4, 4), (32, 512, 4, 3), (16, 512, 4, 2))
        yield from _streams(shape, "int4", 8, cuts)
        for block_n, groups, warps in ((16, 4, 4), (8, 4, 4), (16, 8, 8), (8, 8, 8), (32, 4, 4), (8, 4, 2), (16, 8, 4)):
            held = block_n * shape.inputs // 8 // (32 * warps)
            # Of the weight alone: a register a word. With more there are too few for the rest.
            for rows, most in ((1, 100), (4, 60)):
                if held <= most:
                    config = SkinnyConfig("vector", block_n, groups * 128, warps)
                    yield Entry(rows // 4, shape, "int4", rows, config)


def _streams(shape: sweep.Shape, kind: Kind, rows: int, cuts: tuple[tuple[int, int, int, int], ...]) -> Iterator[Entry]:
    for order, (block_n, block_k, warps, stages) in enumerate(cuts):
        yield Entry(3 + (order > 1), shape, kind, rows, SkinnyConfig("stream", block_n, block_k, warps, stages))


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one shape and kind, more than L2 holds."""

    copies: list[Any]
    dense: Tensor
    nbytes: int

    @classmethod
    def make(cls, shape: sweep.Shape, kind: Kind, device: torch.device) -> Layer:
        from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4

        dense = torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.bfloat16).mul_(0.02)
        weight = sweep.weight_of(shape, kind, device, dense)
        if isinstance(weight, Fp8Weight):
            dense = dequantize_fp8(weight, torch.bfloat16)
        elif isinstance(weight, Int4Weight):
            dense = dequantize_int4(weight, torch.bfloat16)
        parts = (weight,) if isinstance(weight, Tensor) else weight.tensors()
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        copies = [weight]
        while len(copies) * nbytes < 240e6:
            clones = [part.clone() for part in parts]
            copies.append(clones[0] if isinstance(weight, Tensor) else type(weight)(*clones))
        return cls(copies, dense, nbytes)


def launch(entry: Entry, around: sweep.Surroundings, weight: Any) -> Tensor:
    """One product as the engine calls it."""
    if entry.config is not None:
        return around.launch(sweep.Case(entry.shape, entry.kind, entry.rows, entry.config), weight)
    from kernels.gpu.products import finished, normed
    from kernels.gpu.skinny import Norm

    matrix = DenseMatrix(weight) if isinstance(weight, Tensor) else Fp8Matrix(weight, torch.bfloat16)
    inputs = normed(around.x, Norm(around.gain, 1e-6) if entry.shape.norm else None, None, pdl=True)
    if entry.shape.norm:
        return finished(matrix.product(inputs, pdl=True), inputs, swiglu=entry.shape.swiglu, pdl=True)
    return matrix.product_onto(Residual(around.scratch), inputs, pdl=True)


def compile_only(chosen: list[Entry], device: torch.device) -> None:
    """Launches with tensors of no contents (benchmarks/precompile.py runs nothing)."""
    cases = [sweep.Case(e.shape, e.kind, e.rows, e.config) for e in chosen if e.config is not None]
    sweep.compile_only(cases, device)


class Recorder:
    """Rows of the result, on disk at any time."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self._all: dict[str, Any] = {"environment": environment(), "rows": []}
        if resume:
            self._all = json.loads(path.read_text())
        self.rows: list[dict[str, Any]] = self._all["rows"]

    def done(self, entry: Entry) -> bool:
        key = entry.key()
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._all, indent=1))
        part.replace(self._path)


def run(options: argparse.Namespace) -> None:
    """Times all entries, in order, until the seconds are over."""
    chosen = entries()
    print(f"{len(chosen)} entries", flush=True)
    if options.count:
        return
    different = list({(e.shape, e.kind, max(16, e.rows), e.config): e for e in chosen}.values())
    launches: list[Launch] = [partial(compile_only, different[start::64]) for start in range(64)]
    print(f"compiled in {precompile(launches):.0f} s", flush=True)
    torch.manual_seed(0)
    device = torch.device("cuda")
    recorder = Recorder(options.out, options.resume)
    layers: dict[tuple[str, str], Layer] = {}
    arounds: dict[tuple[str, str, int], tuple[sweep.Surroundings, Tensor]] = {}
    deadline = time.monotonic() + options.seconds
    for entry in chosen:
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            break
        if recorder.done(entry):
            continue
        row = entry.key()
        try:
            place = (entry.shape.name, entry.kind)
            if place not in layers:
                layers[place] = Layer.make(entry.shape, entry.kind, device)
            layer = layers[place]
            if (*place, entry.rows) not in arounds:
                around = sweep.Surroundings.make(entry.shape, entry.rows, device)
                case = sweep.Case(entry.shape, entry.kind, entry.rows, SkinnyConfig("dot", 64, 128, 4))
                arounds[(*place, entry.rows)] = (around, sweep.reference(case, around, layer.dense))
            row |= _time(entry, layer, *arounds[(*place, entry.rows)], device)
        except Exception as error:  # one variant that does not fit must not end the sweep
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        recorder.add(row)
        if "failed" in row:
            _carry_on_or_start_again()
    sweep.report(recorder.rows, options.best)


def _time(
    entry: Entry, layer: Layer, around: sweep.Surroundings, want: Tensor, device: torch.device
) -> dict[str, float]:
    around.scratch.copy_(around.residual)
    out = launch(entry, around, layer.copies[0]).float()
    if entry.config is None and entry.kind == "none" and not entry.shape.norm:
        out += around.residual  # whoever reads the stream next adds it
    error = float((out - want).abs().max() / want.abs().max())
    repeats = -(-12 // len(layer.copies)) if layer.nbytes < 3e8 else 2
    micros = sweep.time_graph([partial(launch, entry, around, copy) for copy in layer.copies] * repeats, device)
    return {"error": error, "us": micros, "tb_s": layer.nbytes / micros / 1e6}


def _carry_on_or_start_again() -> None:
    """A kernel that died takes the CUDA context with it: the process starts again behind it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        again = [argument for argument in sys.argv[1:] if argument != "--resume"] + ["--resume"]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.sweep_linear", *again])
