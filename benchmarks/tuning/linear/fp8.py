"""Times products of many rows in float8: every sensible cut of `fp8_linear`, and torch's product by row.

``python -m benchmarks.tuning.linear.fp8 --out FILE`` on a Hopper GPU. Rows of random activations, quantized beforehand;
each figure is the median of a captured graph of products one after the other, and its result is compared with torch's
float8 product.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.linear import torch_product
from benchmarks.kernels.timing import microseconds
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from benchmarks.tuning.linear.cases import SHAPES, Shape, weight_of
from kernels.gpu.linear.fp8 import Fp8Config, fp8_linear, quantize_rows

_LAYERS = SHAPES[:4]
_ROWS = (8192, 3840, 1024)


def candidates() -> Iterator[Fp8Config]:
    """Tiles that fit the chip; more than 128 rows or columns want the sums of two warp groups."""
    for (m, n, stages), promote in itertools.product(
        ((128, 128, 3), (128, 128, 4), (128, 256, 3), (128, 256, 4), (256, 128, 3), (256, 128, 4), (64, 256, 4)),
        (True, False),
    ):
        yield Fp8Config(m, n, 128, 8 if m * n > 64 * 256 else 4, stages, promote)
    yield Fp8Config()


def _compile(config: Fp8Config, shape: Shape, device: torch.device) -> Tensor:
    weight = weight_of(shape, "fp8", device)
    values = torch.empty(8192, shape.inputs, dtype=torch.float8_e4m3fn, device=device)
    out = torch.empty(8192, shape.outputs, dtype=torch.bfloat16, device=device)
    return fp8_linear(values, torch.empty(8192, device=device), weight, out=out, config=config)


def _figures(run: Any, rows: int, shape: Shape, reference: Tensor | None) -> tuple[dict[str, float], Tensor]:
    result = run()
    taken = microseconds([run], launches=8, repeats=5)
    figures = {"us": round(taken, 1), "tflop_s": round(2e-6 * rows * shape.inputs * shape.outputs / taken, 1)}
    if reference is not None:
        figures["difference"] = float((result.float() - reference.float()).norm() / reference.float().norm())
    return figures, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no product after this")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    configs = list(candidates())
    precompile([partial(_compile, config, shape) for config in configs for shape in _LAYERS])
    clock, recorder = Clock(options.seconds), Recorder(options.out, resume=options.resume)
    device = torch.device("cuda")
    for rows, shape in itertools.product(_ROWS, _LAYERS):
        dense = torch.empty(shape.outputs, shape.inputs, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        weight = weight_of(shape, "fp8", device, dense)
        x = torch.empty(rows, shape.inputs, dtype=torch.bfloat16, device=device).normal_()
        values, scale = quantize_rows(x)
        reference: Tensor | None = None
        runs: list[tuple[str, Any]] = [
            ("torch", partial(torch_product, values, scale, weight)),
            ("bf16", partial(torch.mm, x, dense.t())),
            ("quantize_rows", lambda x=x: quantize_rows(x)[0]),
            *((str(asdict(c)), partial(fp8_linear, values, scale, weight, config=c)) for c in configs),
        ]
        for name, run in runs:
            key = {"layer": shape.name, "rows": rows, "what": name}
            if clock.over or recorder.done(key):
                continue
            try:
                figures, result = _figures(run, rows, shape, None if name == "quantize_rows" else reference)
                reference = result if reference is None else reference
                recorder.add(key | figures)
            except Exception as error:  # one that does not run must not end the others
                recorder.add(key | {"failed": describe(error)})
                carry_on_or_start_again("benchmarks.tuning.linear.fp8")
            print(*recorder.rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
