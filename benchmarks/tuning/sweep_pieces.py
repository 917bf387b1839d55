"""Scans of long prompts in pieces side by side, by the number of pieces: time of each pass, error against float64.

``python -m benchmarks.tuning.sweep_pieces --out FILE`` writes each row as it comes and ends with the line for
`kernels.gpu.delta.chunk_configs.TIMES`. Needs a GPU. Microseconds are of one layer, of launches inside a CUDA graph, at
the 4B shape and at half its heads. Errors are of outputs and final states, relative in the root mean square, where much
of a state is left after hundreds of tokens. One piece is the sequential scan.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Recorder
from benchmarks.tuning.sweep_delta import SHAPE, Layer
from kernels.gpu.delta.chunk_configs import FEW, MANY, ChunkConfig, PieceConfig, PieceTimes
from kernels.gpu.delta.pieces import ends_of_pieces, join
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.launch.device import limits_of
from kernels.gpu.segments import TILE, Segments
from tests.kernels.gpu.delta.support import exact_delta

PROMPTS = ((1, 2 * TILE), (1, 3840), (1, 8192), (1, 16384), (2, 4096))
"""Sequences and tokens of each. The first shows what the launches cost."""
PIECES = (1, 2, 4, 8, 16)
ENDS = ((64, 4, 3), (32, 4, 3))
"""Columns, warps and stages of the pass that finds pieces' transitions and states; PieceTimes are of the first."""
SHAPES = (SHAPE, replace(SHAPE, key_heads=SHAPE.key_heads // 2, value_heads=SHAPE.value_heads // 2))
_SLOW = 6.0

Time = Callable[[Sequence[Callable[[], object]]], float]
"""Microseconds of one of some launches."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    shape: DeltaShape
    count: int
    length: int
    pieces: int
    """Asked for; a number of tiles may only have one near it."""
    ends: tuple[int, int, int]

    @property
    def tiles(self) -> int:
        """Tiles of a piece, at least."""
        tiles = -(-self.length // TILE)
        return min(range(tiles, 0, -1), key=lambda piece: abs(tiles // piece - self.pieces))

    def config(self) -> ChunkConfig:
        """The scan by the number of its programs, as chunk_config() has it for 132 multiprocessors."""
        blocks = self.shape.value_heads * self.shape.value_dim // FEW.block_v
        scan = FEW if blocks * self.count * self.pieces <= 132 else MANY
        return replace(scan, pieces=PieceConfig(self.tiles, *self.ends) if self.pieces > 1 else None)

    def segments(self, device: torch.device) -> Segments:
        count = self.count
        return Segments.build([self.length] * count, [9] * count, list(range(1, count + 1)), [0] * count, device)

    def key(self) -> dict[str, Any]:
        return {
            "heads": self.shape.value_heads,
            "prompts": f"{self.count}x{self.length}",
            "pieces": self.pieces,
            "cut": max(1, -(-self.length // TILE) // self.tiles) if self.pieces > 1 else 1,
            "ends": list(self.ends) if self.pieces > 1 else [],
        }


def cases(
    shapes: Sequence[DeltaShape] = SHAPES,
    prompts: Sequence[tuple[int, int]] = PROMPTS,
    pieces: Sequence[int] = PIECES,
) -> Iterator[Case]:
    """All of them; the sequential scan once, and no more pieces than tiles."""
    for shape, (count, length), number, ends in itertools.product(shapes, prompts, pieces, ENDS):
        if number * TILE <= length and (number > 1 or ends == ENDS[0]):
            yield Case(shape, count, length, number, ends)


def passes(case: Case, layer: Layer) -> dict[str, Callable[[], object]]:
    """Launches of a case in their order, by pass. The tiles, which are the same in all of them, have been prepared."""
    config, segments = case.config(), case.segments(layer.device)
    tiles = layer.tiles(segments, config)
    if config.pieces is None:
        return {"scan": partial(layer.scan, segments, tiles, config)}
    inputs = (layer.mixed, layer.projected, layer.state, layer.shape, segments, tiles, config, config.pieces)
    ends = ends_of_pieces(*inputs)
    found: dict[str, Callable[[], object]] = {"ends": partial(ends_of_pieces, *inputs)}
    if ends.most > 2:
        found["join"] = partial(join, ends, layer.shape, segments)
    return found | {"scan": partial(layer.scan, segments, tiles, config, ends)}


@cache
def _layer(shape: DeltaShape, rows: int, device: torch.device) -> Layer:
    return Layer(rows, 4, device, shape=shape, slow=_SLOW)


def measure(case: Case, device: torch.device, time: Time) -> dict[str, Any]:
    """Errors of a case and microseconds of its passes."""
    layer = _layer(case.shape, case.count * case.length, device)
    layer.state.copy_(_start(layer))
    launches = passes(case, layer)
    # Joined states are of the first launch of ``ends``: another one's would not be at the same address.
    for name, launch in launches.items():
        if name != "ends":
            launch()
    if case.shape.value_dim > case.config().block_v:
        layer.norm(case.segments(device), (16, 4))
    row = case.key() | _errors(case, device)
    repeat = max(4, 16384 // (case.count * case.length))
    row |= {f"{name}_us": time([launch] * repeat) for name, launch in launches.items()}
    return row | {"us": sum(row[f"{name}_us"] for name in launches)}


def _start(layer: Layer) -> torch.Tensor:
    return torch.randn(layer.state.shape, generator=torch.Generator().manual_seed(2)).to(layer.device)


@cache
def _expected(shape: DeltaShape, count: int, length: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    layer = _layer(shape, count * length, device)
    start = _start(layer)
    parts = [slice(length * index, length * (index + 1)) for index in range(count)]
    return [
        tuple(each.float() for each in exact_delta(layer.m, layer.mixed[here], layer.projected[here], start[index]))
        for index, here in enumerate(parts, start=1)
    ]


def _errors(case: Case, device: torch.device) -> dict[str, float]:
    """The worst of the sequences."""
    layer = _layer(case.shape, case.count * case.length, device)
    found = {"error_out": 0.0, "error_state": 0.0}
    for index, (out, state) in enumerate(_expected(case.shape, case.count, case.length, device)):
        here = slice(case.length * index, case.length * (index + 1))
        for name, got, exact in (("out", layer.out[here], out), ("state", layer.state[index + 1], state)):
            error = float((got.float() - exact).norm() / exact.norm())
            found[f"error_{name}"] = max(found[f"error_{name}"], error)
    return found


def times_of(rows: Sequence[dict[str, Any]], heads: int = SHAPE.value_heads) -> PieceTimes:
    """What the rule needs to know, from rows of so many heads, of which one prompt fills the card with FEW."""
    wide = {
        (row["prompts"], row["pieces"]): row for row in rows if row["heads"] == heads and row["ends"] != list(ENDS[1])
    }
    shortest, longest = (f"{count}x{length}" for count, length in (PROMPTS[0], PROMPTS[3]))
    tiles = PROMPTS[3][1] // TILE
    one, two, most = (wide[longest, pieces] for pieces in (1, 2, PIECES[-1]))
    ends = (two["ends_us"] - wide[shortest, 2]["ends_us"]) / (tiles // 2 - 1)
    return PieceTimes(
        few=one["scan_us"] / tiles,
        many=2 * two["scan_us"] / tiles,
        ends=ends,
        join=most["join_us"] / (most["cut"] - 2),
        launches=wide[shortest, 2]["ends_us"] - ends,
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The best of each number of pieces beside the sequential scan, a line each."""
    best: dict[tuple[int, str, int], dict[str, Any]] = {}
    for row in rows:
        key = (row["heads"], row["prompts"], row["pieces"])
        best[key] = min(best.get(key, row), row, key=lambda each: each["us"])
    lines = ["heads prompts  pieces  us (of 1)  scan  ends  join  error of out, state"]
    for (heads, prompts, _), row in best.items():
        share = row["us"] / best[heads, prompts, 1]["us"]
        parts = "  ".join(f"{row.get(f'{name}_us', 0.0):.1f}" for name in ("scan", "ends", "join"))
        errors = f"{row['error_out']:.1e}, {row['error_state']:.1e}"
        lines.append(
            f"{heads}  {prompts}  {row['cut']} {row['ends']}  {row['us']:.1f} ({share:.2f})  {parts}  {errors}"
        )
    return "\n".join(lines)


def _time(launches: Sequence[Callable[[], object]]) -> float:
    return min(graph_times(launches))


def _compile(case: Case, device: torch.device) -> None:
    layer = Layer(case.count * case.length, 4, device, shape=case.shape)
    for launch in passes(case, layer).values():
        launch()
    layer.norm(case.segments(device), (16, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = list(cases())
    # Cases of one shape that differ by no more than the number of tiles launch the same kernels.
    alike = {(case.shape, astuple(case.config())[:3], case.ends, case.pieces > 2): case for case in reversed(found)}
    seconds = precompile([partial(_compile, replace(case, length=16 * TILE)) for case in alike.values()])
    print(f"compiled in {seconds:.1f} s", flush=True)
    device, recorder = torch.device("cuda"), Recorder(options.out)
    for case in found:
        recorder.add(measure(case, device, _time))
    print(table(recorder.rows))
    times = times_of(recorder.rows)
    recorder.note(times=repr(times))
    print(f"TIMES[{limits_of(device).architecture}] = {times}")


if __name__ == "__main__":
    main()
