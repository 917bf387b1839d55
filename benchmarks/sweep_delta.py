"""The DeltaNet kernels at the 4B shape, variant by variant: time and error against float64. Needs a GPU.

``python -m benchmarks.sweep_delta`` prints tables and, with --json FILE, writes them. Times are microseconds of one
layer, the best of some replays of a CUDA graph of many launches over different state slots, so that states come from
memory. Errors are of outputs and final states, relative in the root mean square, against the
float64 recurrence.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import environment
from benchmarks.precompile import precompile
from kernels.gpu import gated_delta_chunk as chunk
from kernels.gpu import gated_delta_step as step
from kernels.gpu.conv1d import conv_decode, conv_prefill
from kernels.gpu.delta_shape import DeltaShape
from kernels.gpu.gated_delta_decode import gated_delta_decode
from kernels.gpu.gated_delta_step import StepConfig
from kernels.gpu.gated_delta_tiles import Tiles, prepare_tiles
from kernels.gpu.gated_norm import gated_norm
from kernels.gpu.segments import TILE, Segments
from tests.kernels.gpu.delta_support import Mixer, exact_delta, mixer

SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
_STATE = (SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)
_BYTES = 2 * 4 * SHAPE.value_size * SHAPE.key_dim
"""Read and written a row."""
ROWS = (1, 8, 64, 256)
PREFILLS = ((1, 512), (16, 512), (4, 4096), (1, 16384))
SLOTS = 520
STEPS = [
    StepConfig(*numbers)
    for numbers in (
        (128, 8, 1),
        (128, 16, 1),
        (64, 8, 2),
        (64, 16, 2),
        (32, 4, 2),
        (32, 4, 3),
        (32, 4, 4),
        (32, 8, 4),
        (16, 4, 3),
        (16, 4, 6),
        (16, 2, 4),
    )
]
CHUNKS = [
    chunk.ChunkConfig(block_v, warps, stages, *terms)
    for block_v, warps, stages, terms in (
        *itertools.product((16, 32), (4,), (2, 3), ((1, 1), (2, 1), (2, 2))),
        *itertools.product((64,), (4, 8), (2,), ((1, 1), (2, 1), (2, 2))),
        *itertools.product((64,), (4,), (1, 3), ((1, 1),)),
        *itertools.product((32,), (4, 8), (1,), ((1, 1),)),
        *itertools.product((128,), (8,), (2,), ((1, 1),)),
    )
]
TILES = [
    chunk.ChunkConfig(32, 4, 2, terms, terms, inverse_terms=inverse, tile_warps=warps)
    for inverse, warps, terms in itertools.product((1, 2), (4, 8), (1, 2))
]
CONV_DECODES = [(256, 1), (512, 2), (512, 4), (1024, 4)]
CONV_PREFILLS = [(8, 256, 4), (16, 256, 4), (32, 256, 8), (64, 128, 4), (16, 512, 4), (16, 128, 2), (16, 64, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="compile and check the first variant of each kind only")
    options = parser.parse_args()
    if options.quick:
        for variants in (STEPS, CHUNKS, TILES, CONV_DECODES, CONV_PREFILLS):
            del variants[1:]
    seconds = precompile([partial(_compile, kind, variant) for kind, variant in _variants()])
    print(f"compiled in {seconds:.1f} s", flush=True)
    device = torch.device("cuda")
    results: dict[str, Any] = environment() | {"decode": _decode(device), "prefill": _prefill(device)}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _variants() -> list[tuple[str, Any]]:
    return [
        *(("scan", config) for config in CHUNKS),
        *(("tiles", config) for config in TILES),
        *(("step", config) for config in STEPS),
        *(("conv_decode", config) for config in CONV_DECODES),
        *(("conv_prefill", config) for config in CONV_PREFILLS),
    ]


def _compile(kind: str, variant: Any, device: torch.device) -> None:
    """One variant's launches with shapes that Triton specialises like those that are timed."""
    layer = _Layer(64, 32, device)
    if kind == "step":
        layer.step(layer.state.bfloat16(), layer.slots(1)[0], variant, pdl=False)
        for pdl in (False, True):
            layer.decode(layer.slots(1)[0], variant, pdl=pdl)
            layer.step(layer.state, layer.slots(1)[0], variant, pdl=pdl)
    elif kind == "conv_decode":
        layer.conv_decode(layer.slots(1)[0], variant, pdl=False)
        layer.conv_decode(layer.slots(1)[0], variant, pdl=True)
    else:
        segments = Segments.build([64], [0], [1], [0], device)
        if kind == "conv_prefill":
            layer.conv_prefill(segments, variant)
        elif kind == "tiles":
            layer.tiles(segments, variant)
        else:
            layer.scan(segments, layer.tiles(segments, variant), variant)
            layer.norm(segments)


class _Layer:
    """One DeltaNet layer with T rows of projections and a pool of states."""

    def __init__(self, rows: int, slots: int, device: torch.device, *, alike: float = 0.0) -> None:
        self.m: Mixer = mixer(
            min(rows, 512),
            device,
            key_heads=SHAPE.key_heads,
            heads=SHAPE.value_heads,
            key_dim=SHAPE.key_dim,
            value_dim=SHAPE.value_dim,
            dtype=torch.bfloat16,
            alike=alike,
        )
        repeats = -(-rows // self.m.projected.shape[0])
        self.projected = self.m.projected.repeat(repeats, 1)[:rows]
        self.conv = torch.zeros(slots, 3, self.m.conv_dim, dtype=torch.bfloat16, device=device)
        self.state = torch.zeros(slots, *_STATE, device=device)
        self.mixed = self.projected[:, : self.m.conv_dim].clone()
        self.readers = torch.zeros(256, SHAPE.key_heads, dtype=torch.int32, device=device)
        self.out = torch.empty(rows, SHAPE.value_size, dtype=torch.bfloat16, device=device)
        self.device = device

    def slots(self, rows: int) -> list[Tensor]:
        """Disjoint sets of slots, so that successive launches do not find states in the L2 cache."""
        order = torch.randperm(len(self.state) - 1, generator=torch.Generator().manual_seed(0)).add(1).int()
        return list(order.to(self.device)[: len(order) // rows * rows].view(-1, rows)[:128])

    def step(self, state: Tensor, slots: Tensor, config: StepConfig, *, pdl: bool) -> None:
        step.gated_delta_step(
            self.mixed, self.projected, *self.m.parameters(), state, slots, out=self.out, config=config, pdl=pdl
        )

    def decode(self, slots: Tensor, config: StepConfig, *, pdl: bool) -> None:
        gated_delta_decode(
            self.projected,
            self.m.conv,
            self.conv,
            self.readers,
            *self.m.parameters(),
            self.state,
            slots,
            out=self.out,
            config=config,
            pdl=pdl,
        )

    def conv_decode(self, slots: Tensor, config: tuple[int, int], *, pdl: bool) -> None:
        block, warps = config
        conv_decode(
            self.projected, self.m.conv, self.conv, slots, out=self.mixed, block=block, num_warps=warps, pdl=pdl
        )

    def conv_prefill(self, segments: Segments, config: tuple[int, int, int]) -> None:
        rows, block, warps = config
        conv_prefill(
            self.projected, self.m.conv, self.conv, segments, out=self.mixed, rows=rows, block=block, num_warps=warps
        )

    def tiles(self, segments: Segments, config: chunk.ChunkConfig) -> Tiles:
        return prepare_tiles(
            self.mixed,
            self.projected,
            self.m.negative_a,
            self.m.dt_bias,
            SHAPE,
            segments,
            terms=config.tile_terms,
            inverse_terms=config.inverse_terms,
            num_warps=config.tile_warps,
        )

    def scan(self, segments: Segments, tiles: Tiles, config: chunk.ChunkConfig) -> None:
        chunk.scan_tiles(
            self.mixed,
            self.projected,
            self.m.norm,
            1e-6,
            self.state,
            SHAPE,
            segments,
            tiles,
            self.out,
            config,
        )

    def norm(self, segments: Segments) -> None:
        gate = self.projected[:, SHAPE.conv_dim : SHAPE.conv_dim + SHAPE.value_size]
        gated_norm(self.out, gate, self.m.norm, 1e-6, segments, out=self.out)


def _time(launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds a launch: a graph of all of them, the best of five replays."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000 / len(launches))
    return min(times)


def _error(got: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm())


def _row(what: str, config: object, **figures: float) -> dict[str, Any]:
    text = "  ".join(
        f"{name} {value:9.2f}" if value >= 0.1 else f"{name} {value:9.1e}" for name, value in figures.items()
    )
    numbers = config if isinstance(config, tuple) else tuple(asdict(config).values())  # type: ignore[call-overload]
    print(f"{what:<22} {numbers!s:<28} {text}", flush=True)
    return {"what": what, "config": numbers} | figures


def _decode(device: torch.device) -> list[dict[str, Any]]:
    layer = _Layer(256, SLOTS, device)
    rows = []
    narrow = layer.state.bfloat16()
    check = torch.randn(4, *_STATE, device=device)
    for config in STEPS:
        state = check.clone()
        out = torch.empty(2, SHAPE.value_size, device=device)
        slots = torch.tensor([1, 3], dtype=torch.int32, device=device)
        m = layer.m
        step.gated_delta_step(layer.mixed[:2], m.projected[:2], *m.parameters(), state, slots, out=out, config=config)
        errors = []
        for row in range(2):
            expected, final = exact_delta(m, layer.mixed[row : row + 1], m.projected[row : row + 1], check[slots[row]])
            errors.append(max(_error(out[row : row + 1], expected), _error(state[slots[row]], final)))
        figures = {"error": max(errors)}
        for count in ROWS:
            sets = layer.slots(count)
            figures[f"B{count}"] = _time([partial(layer.step, layer.state, s, config, pdl=False) for s in sets])
        figures["TB/s64"] = 64 * _BYTES / figures["B64"] / 1e6
        figures["TB/s256"] = 256 * _BYTES / figures["B256"] / 1e6
        figures["bf16_64"] = _time([partial(layer.step, narrow, s, config, pdl=False) for s in layer.slots(64)])
        rows.append(_row("step", config, **figures))
    for conv in CONV_DECODES:
        figures = {}
        for count in ROWS:
            sets = layer.slots(count)
            figures[f"B{count}"] = _time([partial(layer.conv_decode, s, conv, pdl=False) for s in sets])
        rows.append(_row("conv_decode", conv, **figures))

    for config, pdl in itertools.product(STEPS, (False, True)):
        figures = {}
        for count in ROWS:
            figures[f"B{count}"] = _time([partial(layer.decode, s, config, pdl=pdl) for s in layer.slots(count)])
        rows.append(_row(f"decode pdl={pdl}", config, **figures))

    def both(slots: Tensor, config: StepConfig, pdl: bool) -> None:
        layer.conv_decode(slots, CONV_DECODES[-1], pdl=pdl)
        layer.step(layer.state, slots, config, pdl=pdl)

    for config, pdl in itertools.product((STEPS[0], STEPS[1], STEPS[5]), (False, True)):
        figures = {f"B{c}": _time([partial(both, s, config, pdl) for s in layer.slots(c)]) for c in ROWS}
        rows.append(_row(f"conv+step pdl={pdl}", config, **figures))
    return rows


def _prefill(device: torch.device) -> list[dict[str, Any]]:
    rows = []
    errors: dict[chunk.ChunkConfig, dict[str, float]] = {}
    for name, alike in (("random", 0.0), ("alike", 0.97)):
        layer = _Layer(448, 8, device, alike=alike)
        start = torch.randn(_STATE, device=device)
        segments = Segments.build([448], [9], [3], [0], device)
        expected, final = exact_delta(layer.m, layer.mixed, layer.m.projected[:448], start)
        for config in [*CHUNKS, *TILES]:
            layer.state[3] = start
            out = torch.empty(448, SHAPE.value_size, dtype=torch.bfloat16, device=device)
            chunk.gated_delta_prefill(
                layer.mixed, layer.projected, *layer.m.parameters(), layer.state, segments, out=out, config=config
            )
            errors.setdefault(config, {})[f"{name} out"] = _error(out, expected)
            errors[config][f"{name} state"] = _error(layer.state[3], final)
    times: dict[tuple[str, object], dict[str, float]] = {}
    for count, length in PREFILLS:
        name = f"{count}x{length}"
        layer = _Layer(count * length, 24, device)
        segments = Segments.build([length] * count, [0] * count, list(range(1, count + 1)), [0] * count, device)
        repeat = max(4, 8192 // (count * length))

        def measure(launch: Callable[[], object], repeat: int = repeat) -> float:
            return _time([launch] * repeat)

        for conv in CONV_PREFILLS:
            times.setdefault(("conv", conv), {})[name] = measure(partial(layer.conv_prefill, segments, conv))
        for config in TILES:
            times.setdefault(("tiles", config), {})[name] = measure(partial(layer.tiles, segments, config))
        by_terms = {terms: layer.tiles(segments, replace(TILES[0], tile_terms=terms)) for terms in (1, 2)}
        for config in CHUNKS:
            launch = partial(layer.scan, segments, by_terms[config.tile_terms], config)
            times.setdefault(("scan", config), {})[name] = measure(launch)
        times.setdefault(("norm", (16, 4)), {})[name] = measure(partial(layer.norm, segments))
        del layer
    for (what, variant), figures in times.items():
        more = errors.get(variant, {}) if isinstance(variant, chunk.ChunkConfig) else {}
        count, length = PREFILLS[1]
        per_token = figures[f"{count}x{length}"] * 24 / (count * length)
        rows.append(_row(what, variant, **figures, **{"us/token": per_token}, **more))
    return rows


if __name__ == "__main__":
    assert TILE == 64
    main()
