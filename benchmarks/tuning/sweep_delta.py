"""The DeltaNet kernels at the 4B shape, variant by variant: time and error against float64. Needs a GPU.

``python -m benchmarks.tuning.sweep_delta`` prints a line a variant and, with --json FILE, writes each as it comes.
Times are microseconds of one layer, the best of some replays of a CUDA graph of many launches over different state
slots, so that states come from memory. Errors are of outputs and final states, relative in the root mean square,
against the float64 recurrence. A variant that crashes takes its process with it; the rest is measured in the next one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Clock, Recorder
from kernels.gpu.delta import chunk
from kernels.gpu.delta.chunk_configs import ChunkConfig
from kernels.gpu.delta.conv1d import conv_decode, conv_prefill
from kernels.gpu.delta.gated_norm import gated_norm
from kernels.gpu.delta.pieces import Joined
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.step import gated_delta_step
from kernels.gpu.delta.tiles import Tiles, prepare_tiles
from kernels.gpu.segments import Segments
from tests.kernels.gpu.delta.support import Mixer, exact_delta, mixer

SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
STATE = (SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)
BYTES = 2 * 4 * SHAPE.value_size * SHAPE.key_dim
"""Bytes of a row's state, read and written."""
ROWS = (1, 8, 64, 256)
PREFILLS = ((1, 512), (16, 512), (1, 3840), (2, 4096))
SLOTS = 520
CHECKED = 448
STEPS = (2, 4, 8)
"""Warps of a program."""
CHUNKS = [
    ChunkConfig(block_v, warps, stages, *terms, inverse_terms=1)
    for block_v, warps, stages, terms in (
        *itertools.product((32,), (4,), (2, 3, 4), ((1, 1),)),
        *itertools.product((64,), (4, 8), (2, 3), ((1, 1),)),
        *itertools.product((16,), (4,), (2, 3), ((1, 1),)),
        *itertools.product((32,), (4,), (2, 3), ((2, 1), (2, 2))),
    )
]
TILES = [
    ChunkConfig(32, 4, 2, terms, terms, inverse_terms=inverse, tile_warps=warps)
    for inverse, warps, terms in itertools.product((1, 2), (4, 8), (1, 2))
]
CONV_DECODES = [(0, 256, 1), (1, 256, 1), (2, 256, 1), (4, 256, 1), (8, 256, 1), (4, 512, 2), (4, 128, 1), (2, 512, 1)]
"""Rows (0: by their number), channels and warps of a program."""
CONV_PREFILLS = [
    (8, 256, 1),
    (8, 512, 4),
    (8, 1024, 4),
    (16, 256, 1),
    (16, 256, 2),
    (16, 512, 2),
    (16, 512, 4),
    (16, 1024, 4),
    (32, 256, 1),
]
"""Rows, channels and warps of a program."""

Case = tuple[str, Any]
"""Kernel that is measured, and its variant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="start no variant after this")
    parser.add_argument("--only", nargs="*", help="kinds: step pair conv_decode scan tiles conv_prefill norm")
    options = parser.parse_args()
    cases = [case for case in _cases() if not options.only or case[0] in options.only]
    seconds = precompile([partial(_compile, case) for case in cases])
    print(f"compiled in {seconds:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = options.json or Path(scratch) / "rows.json"
        path.unlink(missing_ok=True)
        _isolated(cases, path, Clock(options.seconds))


def _cases() -> list[Case]:
    """Cases, those least likely to fail first."""
    pairs = itertools.product((4,), (False, True))
    return [
        *(("step", config) for config in STEPS),
        *(("conv_decode", config) for config in CONV_DECODES),
        *(("pair", pair) for pair in pairs),
        *(("conv_prefill", config) for config in CONV_PREFILLS),
        ("norm", (16, 4)),
        ("norm", (32, 4)),
        *(("tiles", config) for config in TILES),
        *(("scan", config) for config in CHUNKS),
    ]


def _isolated(cases: Sequence[Case], path: Path, clock: Clock) -> None:
    """Writes the cases' figures, measured in a process that is replaced when a case kills it."""
    context = multiprocessing.get_context("fork")
    done = 0
    while done < len(cases) and not clock.over:
        worker = context.Process(target=_work, args=(cases[done:], path, clock))
        worker.start()
        worker.join()
        recorder = Recorder(path, resume=True)
        if worker.exitcode:
            what, variant = cases[len(recorder.rows)]
            recorder.add(_report(what, variant, {"failed": float(worker.exitcode)}))
        done = len(recorder.rows)
    if clock.over:
        print(f"out of time: {done} of {len(cases)} variants", flush=True)


def _work(cases: Sequence[Case], path: Path, clock: Clock) -> None:
    device = torch.device("cuda")
    recorder = Recorder(path, resume=True)
    for what, variant in cases:
        if clock.over:
            return
        figures = _MEASURES[what](variant, device)
        torch.cuda.synchronize()
        recorder.add(_report(what, variant, figures))


def _report(what: str, variant: Any, figures: dict[str, float]) -> dict[str, Any]:
    text = "  ".join(f"{name} {x:8.2f}" if x >= 0.1 else f"{name} {x:8.1e}" for name, x in figures.items())
    config = asdict(variant) if isinstance(variant, ChunkConfig) else variant
    numbers = tuple(config.values()) if isinstance(config, dict) else config
    print(f"{what:<12} {numbers!s:<32} {text}", flush=True)
    return {"what": what, "config": str(config)} | figures


def _compile(case: Case, device: torch.device) -> None:
    """A case's launches with shapes that Triton specialises like those that are timed."""
    what, variant = case
    layer = Layer(64, 32, device)
    slots = layer.slots(1)[0]
    segments = Segments.build([64], [0], [1], [0], device)
    if what == "step":
        layer.step(slots, variant)
        layer.step(slots, variant, state=layer.state.bfloat16())
    elif what == "conv_decode":
        layer.conv_decode(slots, variant)
    elif what == "pair":
        layer.pair(slots, *variant)
    elif what == "conv_prefill":
        layer.conv_prefill(segments, variant)
    elif what == "norm":
        layer.norm(segments, variant)
    else:
        layer.scan(segments, layer.tiles(segments, variant), variant)
        layer.norm(segments, (16, 4))


class Layer:
    """One DeltaNet layer with T rows of projections and a pool of states."""

    def __init__(
        self,
        rows: int,
        slots: int,
        device: torch.device,
        *,
        shape: DeltaShape = SHAPE,
        alike: float = 0.0,
        slow: float = 0.0,
    ) -> None:
        self.shape = shape
        self.m: Mixer = mixer(
            min(rows, 512),
            device,
            key_heads=shape.key_heads,
            heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=torch.bfloat16,
            alike=alike,
            slow=slow,
        )
        self.projected = self.m.projected.repeat(-(-rows // self.m.projected.shape[0]), 1)[:rows]
        self.conv = torch.zeros(slots, 3, self.m.conv_dim, dtype=torch.bfloat16, device=device)
        self.state = torch.zeros(slots, shape.value_heads, shape.key_dim, shape.value_dim, device=device)
        self.mixed = self.projected[:, : self.m.conv_dim].clone()
        self.out = torch.empty(rows, shape.value_size, dtype=torch.bfloat16, device=device)
        self.device = device

    def slots(self, rows: int) -> list[Tensor]:
        """Disjoint sets of slots, so that successive launches do not find states in the L2 cache."""
        order = torch.randperm(len(self.state) - 1, generator=torch.Generator().manual_seed(0)).add(1).int()
        return list(order.to(self.device)[: len(order) // rows * rows].view(-1, rows)[:128])

    def step(self, slots: Tensor, num_warps: int, *, pdl: bool = False, state: Tensor | None = None) -> None:
        gated_delta_step(
            self.mixed,
            self.projected,
            *self.m.parameters(),
            self.state if state is None else state,
            slots,
            out=self.out,
            num_warps=num_warps,
            pdl=pdl,
        )

    def conv_decode(self, slots: Tensor, config: tuple[int, int, int], *, pdl: bool = False) -> None:
        conv_decode(
            self.projected,
            self.m.conv,
            self.conv,
            slots,
            out=self.mixed,
            row_block=config[0],
            block=config[1],
            num_warps=config[2],
            pdl=pdl,
        )

    def pair(self, slots: Tensor, num_warps: int, pdl: bool) -> None:
        self.conv_decode(slots, CONV_DECODES[0], pdl=pdl)
        self.step(slots, num_warps, pdl=pdl)

    def conv_prefill(self, segments: Segments, config: tuple[int, int, int]) -> None:
        rows, block, warps = config
        conv_prefill(
            self.projected, self.m.conv, self.conv, segments, out=self.mixed, rows=rows, block=block, num_warps=warps
        )

    def tiles(self, segments: Segments, config: ChunkConfig) -> Tiles:
        return prepare_tiles(
            self.mixed,
            self.projected,
            self.m.negative_a,
            self.m.dt_bias,
            self.shape,
            segments,
            terms=config.tile_terms,
            inverse_terms=config.inverse_terms,
            num_warps=config.tile_warps,
        )

    def scan(self, segments: Segments, tiles: Tiles, config: ChunkConfig, joined: Joined | None = None) -> None:
        inputs = (self.mixed, self.projected, self.m.norm, 1e-6, self.state, self.shape)
        chunk.scan_tiles(*inputs, segments, tiles, self.out, config, joined=joined)

    def norm(self, segments: Segments, config: tuple[int, int]) -> None:
        gate = self.projected[:, self.shape.conv_dim : self.shape.conv_dim + self.shape.value_size]
        rows, warps = config
        gated_norm(self.out, gate, self.m.norm, 1e-6, segments, out=self.out, rows=rows, num_warps=warps)


@functools.cache
def _layer(rows: int, slots: int, device: torch.device, alike: float = 0.0) -> Layer:
    return Layer(rows, slots, device, alike=alike)


def _time(launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds a launch."""
    return min(graph_times(launches))


def _error(got: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm())


def _step(num_warps: int, device: torch.device) -> dict[str, float]:
    layer = _layer(256, SLOTS, device)
    m, before = layer.m, torch.randn(4, *STATE, device=device)
    state, out = before.clone(), torch.empty(2, SHAPE.value_size, device=device)
    slots = torch.tensor([1, 3], dtype=torch.int32, device=device)
    gated_delta_step(layer.mixed[:2], m.projected[:2], *m.parameters(), state, slots, out=out, num_warps=num_warps)
    figures = {"error": 0.0}
    for row, slot in enumerate(slots.tolist()):
        here = slice(row, row + 1)
        expected, final = exact_delta(m, layer.mixed[here], m.projected[here], before[slot])
        figures["error"] = max(figures["error"], _error(out[here], expected), _error(state[slot], final))
    for count in ROWS:
        figures[f"B{count}"] = _time([partial(layer.step, slots, num_warps) for slots in layer.slots(count)])
    figures |= {f"TB/s{count}": count * BYTES / figures[f"B{count}"] / 1e6 for count in (64, 256)}
    narrow = layer.state.bfloat16()
    figures["bf16_64"] = _time([partial(layer.step, slots, num_warps, state=narrow) for slots in layer.slots(64)])
    return figures


def _conv_decode(config: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    layer = _layer(256, SLOTS, device)
    return {f"B{count}": _time([partial(layer.conv_decode, s, config) for s in layer.slots(count)]) for count in ROWS}


def _pair(variant: tuple[int, bool], device: torch.device) -> dict[str, float]:
    layer = _layer(256, SLOTS, device)
    return {f"B{count}": _time([partial(layer.pair, s, *variant) for s in layer.slots(count)]) for count in ROWS}


def _prefills(launch: Callable[[Layer, Segments], object], device: torch.device) -> dict[str, float]:
    figures: dict[str, float] = {}
    for count, length in PREFILLS:
        layer = _layer(count * length, 24, device)
        segments = Segments.build([length] * count, [0] * count, list(range(1, count + 1)), [0] * count, device)
        repeat = max(4, 8192 // (count * length))
        figures[f"{count}x{length}"] = _time([partial(launch, layer, segments)] * repeat)
    count, length = PREFILLS[1]
    # All 24 layers, saturated.
    figures["us/token"] = figures[f"{count}x{length}"] * 24 / (count * length)
    return figures


@functools.cache
def _expected(device: torch.device, alike: float) -> tuple[Tensor, Tensor, Tensor]:
    layer = _layer(CHECKED, 8, device, alike)
    start = torch.randn(STATE, device=device)
    return start, *exact_delta(layer.m, layer.mixed, layer.m.projected, start)


def _errors(config: ChunkConfig, device: torch.device) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, alike in (("random", 0.0), ("alike", 0.97)):
        layer = _layer(CHECKED, 8, device, alike)
        start, expected, final = _expected(device, alike)
        layer.state[3] = start
        segments = Segments.build([CHECKED], [9], [3], [0], device)
        chunk.gated_delta_prefill(
            layer.mixed, layer.projected, *layer.m.parameters(), layer.state, segments, out=layer.out, config=config
        )
        figures |= {f"{name} out": _error(layer.out, expected), f"{name} state": _error(layer.state[3], final)}
    return figures


def _tiles(config: ChunkConfig, device: torch.device) -> dict[str, float]:
    errors = _errors(config, device)
    return _prefills(lambda layer, segments: layer.tiles(segments, config), device) | errors


def _scan(config: ChunkConfig, device: torch.device) -> dict[str, float]:
    errors = _errors(config, device)
    kept: dict[int, Tiles] = {}

    def launch(layer: Layer, segments: Segments) -> None:
        if id(layer) not in kept:
            kept[id(layer)] = layer.tiles(segments, config)
        layer.scan(segments, kept[id(layer)], config)

    return _prefills(launch, device) | errors


def _conv_prefill(config: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    return _prefills(lambda layer, segments: layer.conv_prefill(segments, config), device)


def _norm(config: tuple[int, int], device: torch.device) -> dict[str, float]:
    return _prefills(lambda layer, segments: layer.norm(segments, config), device)


_MEASURES: dict[str, Callable[[Any, torch.device], dict[str, float]]] = {
    "step": _step,
    "conv_decode": _conv_decode,
    "pair": _pair,
    "conv_prefill": _conv_prefill,
    "norm": _norm,
    "tiles": _tiles,
    "scan": _scan,
}


if __name__ == "__main__":
    main()
