"""Times the products of experts at the 35B-A3B shape: cuts of the first and of the second one, beside the least time.

``python -m benchmarks.tuning.experts --out FILE`` on a GPU: route, both products and the sum, as in a decode step or in
a prefill, in a captured graph over different choices of experts. One product's cut is changed at a time. The least time
is that of reading the chosen experts once at the nominal bandwidth. Ends with the best of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import microseconds
from benchmarks.lib.precompile import precompile
from benchmarks.lib.random_checkpoint import SHAPES
from benchmarks.lib.random_model import RandomWeights
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.serving.floor import distinct_experts
from kernels.gpu.experts.configs import Cut, ExpertShape, Grouped, GroupTile, Streamed, StreamTile, choose, fitting
from kernels.gpu.experts.mlp import ExpertMatrices, pass_experts
from kernels.gpu.experts.routing import route
from kernels.gpu.launch.device import DeviceLimits, architectures, limits_of, named
from kernels.gpu.linear.skinny import Weight
from kernels.gpu.linear.skinny_configs import Kind
from services.engine.models.footprint import Quantization, matrix_bytes
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig

CONFIG = Qwen3_5MoeConfig.from_dict(SHAPES["qwen3.5-35b-a3b"])
_ROWS = (1, 4, 16, 64, 2048, 8192)
_TOGETHER = 64
"""Most rows with the shared expert among the chosen ones."""
_CHOICES = 12


def shape_of(kind: Kind, config: Qwen3_5MoeConfig = CONFIG) -> ExpertShape:
    return ExpertShape(
        config.num_experts, config.experts_per_token, config.hidden_size, config.expert_size, kind, itemsize=2
    )


def candidates(rows: int, kind: Kind, device: DeviceLimits) -> Iterator[tuple[str, Cut]]:
    """The cut that is chosen, and others with one product cut otherwise."""
    shape = shape_of(kind)
    chosen = choose(rows, shape, device)
    yield "chosen", chosen
    if rows <= 8:
        streamed = chosen if isinstance(chosen, Streamed) else choose(1, shape, device)
        if not isinstance(streamed, Streamed):
            raise TypeError("one row is streamed")
        for block_n, (groups, warps) in product((4, 8, 16), ((8, 1), (8, 2), (16, 2), (8, 4), (16, 4), (16, 8))):
            yield "gate_up", replace(streamed, gate_up=StreamTile(block_n, groups, warps))
        for block_n, (groups, warps) in product((1, 2, 4, 8), ((4, 1), (8, 1), (4, 2), (4, 4))):
            yield "down", replace(streamed, down=StreamTile(block_n, groups, warps))
    if rows < 4:
        return
    many = rows * shape.chosen > 32 * shape.count
    high = (64, 128) if many else (16, 32)
    wide = ((128, 4), (128, 8), (256, 8)) if many else ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8))
    inner = (64, 128) if kind == "none" else (128,) if many or kind == "int4" else (128, 256)
    base = chosen if isinstance(chosen, Grouped) else choose(8, shape, device)
    if not isinstance(base, Grouped):
        raise TypeError("eight rows are grouped")
    quantized = (False, True) if kind == "fp8" and many else (False,)
    for float8, block_m, (block_n, warps), block_k, stages in product(quantized, high, wide, inner, (3, 4, 6)):
        tile = GroupTile(block_m, block_n, block_k, warps, stages)
        if tile.shared_memory(kind, 2, float8=float8) > device.shared_memory - 2048:
            continue
        other = fitting(base.down, shape, device, float8=float8)
        yield "gate_up", Grouped(tile, other, float8)
        yield "down", Grouped(other, tile, float8)


class Layer:
    """Experts of one layer and inputs of a number of rows; on the CPU of any contents."""

    def __init__(self, kind: Quantization, device: torch.device) -> None:
        made = RandomWeights(CONFIG, device, kind, None, empty=device.type == "cpu")
        layer = made._layer("linear_attention")
        if layer.experts is None:
            raise TypeError("a layer without experts")
        self.device = device
        self._every: tuple[Weight, Weight] = layer.experts.gate_up.weight, layer.experts.down.weight
        self._shared: tuple[Weight, Weight] = layer.gate_up.weight, layer.down.weight

    def runs(self, rows: int, cut: Cut, choices: int) -> list[Any]:
        """Runs of the same work with different choices of experts."""
        together = rows <= _TOGETHER
        matrices = ExpertMatrices(*self._every, self._shared if together else None)
        x = torch.randn(rows, CONFIG.hidden_size, device=self.device).bfloat16()
        stream, active = torch.zeros_like(x), None
        if not together:
            active = torch.zeros(rows, CONFIG.intermediate_size, dtype=x.dtype, device=self.device)

        def run(logits: Tensor) -> Tensor:
            routes = route(logits, CONFIG.experts_per_token, shared=together, active=active)
            pass_experts(stream, x, routes, matrices, cut)
            return stream

        drawn = torch.randn(choices, rows, CONFIG.num_experts + 1, device=self.device).bfloat16()
        return [partial(run, logits) for logits in drawn]


def _launch(kind: Quantization, rows: int, cut: Cut, device: torch.device) -> Tensor:
    result: Tensor = Layer(kind, device).runs(rows, cut, 1)[0]()
    return result


def least(rows: int, kind: Quantization, bandwidth: float) -> float:
    """Microseconds."""
    size = matrix_bytes(2 * CONFIG.expert_size, CONFIG.hidden_size, 2, kind)
    size += matrix_bytes(CONFIG.hidden_size, CONFIG.expert_size, 2, kind)
    count = distinct_experts(CONFIG.num_experts, CONFIG.experts_per_token, rows) + (rows <= _TOGETHER)
    return 1e6 * count * size / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=list(_ROWS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["fp8", "int4", "none"])
    parser.add_argument("--limits", choices=architectures(), default="sm90", help="cuts that fit such a card")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no cut after this")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    work = [
        (kind, rows, side, cut)
        for kind, rows in product(options.kinds, options.rows)
        for side, cut in candidates(rows, kind, named(options.limits))
    ]
    print(f"{len(work)} cuts", flush=True)
    print(
        f"compiled in {precompile([partial(_launch, kind, rows, cut) for kind, rows, _, cut in work]):.0f} s",
        flush=True,
    )
    clock, recorder = Clock(options.seconds), Recorder(options.out, resume=options.resume)
    device = torch.device("cuda")
    bandwidth = limits_of(device).bandwidth
    layer: Layer | None = None
    held = ""
    for kind, rows, side, cut in work:
        tile = asdict(cut if side == "chosen" else getattr(cut, side))
        key = {"kind": kind, "rows": rows, "what": side, "cut": type(cut).__name__, "tile": tile}
        if isinstance(cut, Grouped):
            key["float8"] = cut.float8
        if clock.over or recorder.done(key):
            continue
        if layer is None or held != kind:
            layer, held = None, kind
            layer = Layer(kind, device)
        try:
            runs = layer.runs(rows, cut, _CHOICES)
            taken = microseconds(runs, launches=2 * _CHOICES, repeats=5)
            floor = least(rows, kind, bandwidth)
            recorder.add(
                key | {"us": round(taken, 2), "floor_us": round(floor, 2), "of_floor": round(floor / taken, 3)}
            )
        except Exception as error:  # one that does not run must not end the others
            recorder.add(key | {"failed": describe(error)})
            carry_on_or_start_again("benchmarks.tuning.experts")
        print(*recorder.rows[-1].values(), flush=True)
    print(table(recorder.rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The chosen cut beside the best of each product, a line a kind and number of rows."""
    lines = ["kind  rows   floor us  chosen us   best gate_up                    best down"]
    measured = [row for row in rows if "us" in row]
    for kind, count in dict.fromkeys((row["kind"], row["rows"]) for row in measured):
        here = [row for row in measured if (row["kind"], row["rows"]) == (kind, count)]
        best = {}
        for side in ("gate_up", "down"):
            found = min((row for row in here if row["what"] == side), key=lambda row: row["us"], default=None)
            best[side] = "" if found is None else f"{found['us']:8.1f} {tuple(found['tile'].values())} {found['cut']}"
        chosen = next((row["us"] for row in here if row["what"] == "chosen"), float("nan"))
        lines.append(
            f"{kind:5} {count:5} {here[0]['floor_us']:9.1f} {chosen:10.1f}  {best['gate_up']:44}{best['down']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
