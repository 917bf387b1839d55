"""Search for the speed of 1 to 64 rows, in a minute: the most important cuts first, the result written after each.

Run by ``python -m benchmarks.tuning.linear.sweep --focus --out FILE``. Every figure contains what surrounds the product
(norm, activation, residual), whatever the number of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.launches import no_products, one_share
from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import Launch, precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.tuning.linear.cases import SHAPES, Case, Shape, Surroundings, reference, report, weight_of
from kernels.gpu.launch.device import limits_of
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig, choose
from services.engine.models.residual import Residual
from services.engine.models.weights.matrix import DenseMatrix, Fp8Matrix

_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ, _HEAD = SHAPES
_SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor."""
_MULTIPROCESSORS = 132
_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure."""

    urgency: int
    """Lower comes first."""
    shape: Shape
    kind: Kind
    rows: int
    config: SkinnyConfig | None
    """None: a kernel for each of norm, product and activation, the product torch's or fp8_linear."""

    def key(self) -> dict[str, Any]:
        cut: dict[str, Any] = {"variant": "apart"} if self.config is None else asdict(self.config)
        return {"layer": self.shape.name, "kind": self.kind, "rows": self.rows, **cut}


def entries() -> list[Entry]:
    """All of them, the most important first, each once."""
    found = sorted((*_gate_up(), *_others(), *_streams(), *_fp8(), *_int4()), key=lambda entry: entry.urgency)
    return list({tuple(entry.key().items()): entry for entry in found}.values())


def _tma(
    shape: Shape, rows: int, block_n: int, block_k: int, stages: int, splits: int = 1, prefetch: int = 0
) -> SkinnyConfig:
    """A cut of the tma variant in bf16 with so many stages, or as many as leave all programs resident at once."""
    programs = -(-shape.outputs // block_n) * splits
    neighbours = -(-programs // _MULTIPROCESSORS)
    fitting = (_SHARED // neighbours - 2048) // ((block_n + max(16, rows)) * block_k * 2)
    return SkinnyConfig("tma", block_n, block_k, 4, max(2, min(stages, fitting)), splits, prefetch)


def _gate_up() -> Iterator[Entry]:
    """One split, few stages: 144 programs that all are resident, on 132 multiprocessors. What norm and activation cost
    stands beside."""
    for rows in (8, 16, 64):
        yield Entry(0, _GATE_UP, "none", rows, None)
        for prefetch in (0, 1024):
            for block_k, stages in ((64, 3), (64, 4), (64, 5), (128, 2), (128, 3)):
                yield Entry(
                    int(rows == 64), _GATE_UP, "none", rows, SkinnyConfig("tma", 128, block_k, 4, stages, 1, prefetch)
                )
        yield Entry(1, _GATE_UP, "none", rows, SkinnyConfig("tma", 128, 64, 4, 4, 2))
    bare = replace(_GATE_UP, name="gate_up -norm", norm=False)
    for shape in (
        bare,
        replace(_GATE_UP, name="gate_up -swiglu", swiglu=False),
        replace(bare, name="gate_up -both", swiglu=False),
    ):
        yield Entry(0, shape, "none", 16, SkinnyConfig("tma", 128, 64, 4, 4))
        yield Entry(1, shape, "none", 16, None)


def _others() -> Iterator[Entry]:
    cuts: tuple[tuple[Shape, tuple[tuple[int, ...], ...]], ...] = (
        (_DOWN, ((64, 128, 8, 3), (64, 128, 5, 6), (64, 64, 8, 3))),
        (_IN_PROJ, ((128, 128, 6, 1, 1024), (64, 128, 5, 1), (128, 64, 8, 1))),
        (_OUT_PROJ, ((64, 128, 8, 3), (64, 64, 8, 3), (64, 128, 3, 8))),
    )
    for rows, urgency in ((16, 0), (64, 0), (8, 1), (32, 1)):
        for shape, numbers in cuts:
            yield Entry(urgency, shape, "none", rows, None)
            for cut in numbers:
                yield Entry(urgency, shape, "none", rows, _tma(shape, rows, *cut))


def _streams() -> Iterator[Entry]:
    """Weights straight into registers, as the vector variant loads them."""
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        for rows in (8, 16):
            for cut in ((16, 512, 4, 2), (16, 512, 4, 3), (16, 256, 4, 4), (16, 1024, 4, 2), (32, 512, 4, 2)):
                # With the norm folded in the last one spills registers.
                if not (shape.norm and cut[0] > 16):
                    yield Entry(2 if rows == 16 else 3, shape, "none", rows, SkinnyConfig("stream", *cut))


def _fp8() -> Iterator[Entry]:
    """Entries that the table has."""
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        for rows in (1, 8, 16, 64):
            config = choose(rows, shape.outputs, shape.inputs, "fp8", shape.swiglu, limits_of(torch.device("cuda")))
            yield Entry(3, shape, "fp8", rows, config)
        yield Entry(3, shape, "fp8", 64, None)


def _int4() -> Iterator[Entry]:
    """Weights that all fit the registers, beside the variant that takes over from 9 rows."""
    wide = ((32, 4), (16, 4), (16, 2), (16, 8), (64, 8))
    narrow = ((16, 8), (16, 4), (16, 16), (32, 8))
    for shape in (_GATE_UP, _DOWN, _IN_PROJ, _OUT_PROJ):
        for rows, urgency in ((1, 2), (4, 3), (8, 3)):
            yield Entry(urgency, shape, "int4", rows, SkinnyConfig("stream", 16, 512, warps=4, stages=4))
            for block_n, warps in wide if shape.outputs >= 8192 else narrow:
                if block_n * shape.inputs // (256 * warps) <= (144 if rows == 1 else 80):
                    config = SkinnyConfig("vector", block_n, 128 * warps, warps=warps)
                    yield Entry(urgency, shape, "int4", rows, config)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one shape and kind, more than L2 holds."""

    copies: list[Any]
    dense: Tensor
    nbytes: int

    @classmethod
    def make(cls, shape: Shape, kind: Kind, device: torch.device) -> Layer:
        from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4

        dense = torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.bfloat16).mul_(0.02)
        weight = weight_of(shape, kind, device, dense)
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


def launch(entry: Entry, around: Surroundings, weight: Any) -> Tensor:
    """One product as the engine calls it."""
    if entry.config is not None:
        return around.launch(Case(entry.shape, entry.kind, entry.rows, entry.config), weight)
    from kernels.gpu.linear.products import finished, normed
    from kernels.gpu.linear.skinny import Norm

    matrix = DenseMatrix(weight) if isinstance(weight, Tensor) else Fp8Matrix(weight, torch.bfloat16)
    inputs = normed(around.x, Norm(around.gain, 1e-6) if entry.shape.norm else None, None, pdl=True)
    if not entry.shape.residual:
        return finished(matrix.product(inputs, pdl=True), inputs, swiglu=entry.shape.swiglu, pdl=True)
    return matrix.product_onto(Residual(around.scratch), inputs, pdl=True)


def compile_share(chosen: list[Entry], index: int, device: torch.device) -> None:
    """One of _PROCESSES parts of all kernels (benchmarks/lib/precompile.py runs nothing)."""
    with one_share(index, _PROCESSES), no_products():
        for entry in chosen:
            around = Surroundings.make(entry.shape, entry.rows, device)
            # What does not compile is reported when it is timed, and must not keep the others from compiling.
            with contextlib.suppress(Exception):
                launch(entry, around, weight_of(entry.shape, entry.kind, device))


def run(options: argparse.Namespace) -> None:
    """Times all entries, in order, until the seconds are over."""
    chosen = entries()
    print(f"{len(chosen)} entries", flush=True)
    if options.count:
        return
    shares: list[Launch] = [partial(compile_share, chosen, index) for index in range(_PROCESSES)]
    print(f"compiled in {precompile(shares):.0f} s", flush=True)
    torch.manual_seed(0)
    device = torch.device("cuda")
    recorder = Recorder(options.out, resume=options.resume)
    layers: dict[tuple[int, int, str], Layer] = {}
    arounds: dict[tuple[str, str, int], tuple[Surroundings, Tensor]] = {}
    clock = Clock(options.seconds)
    for entry in chosen:
        if clock.over:
            print("out of time", flush=True)
            break
        if recorder.done(entry.key()):
            continue
        row = entry.key()
        try:
            size = (entry.shape.outputs, entry.shape.inputs, entry.kind)
            if size not in layers:
                layers[size] = Layer.make(entry.shape, entry.kind, device)
            layer = layers[size]
            place = (entry.shape.name, entry.kind)
            if (*place, entry.rows) not in arounds:
                around = Surroundings.make(entry.shape, entry.rows, device)
                case = Case(entry.shape, entry.kind, entry.rows, SkinnyConfig("dot", 64, 128, 4))
                arounds[(*place, entry.rows)] = (around, reference(case, around, layer.dense))
            row |= _time(entry, layer, *arounds[(*place, entry.rows)])
        except Exception as error:  # one variant that does not fit must not end the sweep
            row["failed"] = describe(error)
        recorder.add(row)
        if "failed" in row:
            carry_on_or_start_again("benchmarks.tuning.linear.sweep")
    report(recorder.rows, options.best)


def _time(entry: Entry, layer: Layer, around: Surroundings, want: Tensor) -> dict[str, float]:
    around.scratch.copy_(around.residual)
    out = launch(entry, around, layer.copies[0]).float()
    if entry.config is None and entry.kind == "none" and entry.shape.residual:
        out += around.residual  # whoever reads the stream next adds it
    error = float((out - want).abs().max() / want.abs().max())
    repeats = -(-12 // len(layer.copies)) if layer.nbytes < 3e8 else 2
    micros = min(graph_times([partial(launch, entry, around, copy) for copy in layer.copies] * repeats))
    return {"error": error, "us": micros, "tb_s": layer.nbytes / micros / 1e6}
