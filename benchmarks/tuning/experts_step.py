"""Times a decode step of the 35B-A3B shape with its experts, and the products around them, cut otherwise.

``python -m benchmarks.tuning.experts_step --out FILE`` on a GPU: layers and head with random weights, captured as a
CUDA graph for each number of rows; again with one thing changed (kernels.gpu.experts.configs.Streamed: a tile, or how
much is asked of L2 while the router decides; or the cut of one product), replayed in turn with the step as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.launches import no_products, one_share
from benchmarks.lib.precompile import precompile
from benchmarks.lib.random_checkpoint import config_of, family_config
from benchmarks.lib.recorder import Recorder, describe
from benchmarks.tuning.experts import shape_of
from benchmarks.tuning.step.decode_step import DecodeStep, one_of_each
from benchmarks.tuning.step.sweep import Timer
from benchmarks.tuning.step.variants import Variant
from kernels.gpu.experts.configs import Cut, ExpertShape, Streamed, StreamTile, choose
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.models.footprint import Quantization
from services.engine.models.qwen3_5 import fused_experts
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig

_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class OtherExperts(Variant):
    """A step whose experts are cut otherwise."""

    experts: Cut | None = None
    """None: as they are."""

    def launch(self, step: DecodeStep) -> Tensor:
        if (cut := self.experts) is None:
            return Variant.launch(self, step)
        with patch.object(fused_experts, "choose", lambda *_: cut):
            return Variant.launch(self, step)


_GATE_UP = (
    *((4, 16, 4), (8, 16, 4), (16, 16, 4), (8, 32, 8), (16, 32, 8), (8, 8, 2), (16, 8, 2), (4, 8, 2)),
    *((8, 4, 1), (4, 4, 1), (16, 4, 1)),
)
_DOWN = ((1, 4, 1), (2, 4, 1), (2, 8, 2), (4, 8, 2), (4, 4, 1), (4, 16, 4), (1, 8, 2))
_PRODUCTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "in_proj": ((4, 512, 2), (4, 1024, 2), (4, 1024, 4), (8, 1024, 2), (8, 1024, 4), (4, 2048, 4), (8, 512, 2)),
    "out_proj": ((2, 1024, 2), (4, 1024, 2), (2, 2048, 4), (4, 2048, 4), (8, 1024, 4), (2, 2048, 2)),
    "head": ((8, 512, 2), (8, 1024, 4), (4, 1024, 2), (16, 1024, 4), (8, 1024, 2)),
}
"""Rows of the weight, groups or inputs of a load, warps."""
_MEGABYTES = (0, 12, 26)
_MOST_STREAMED = 8
"""Rows up to which experts may be streamed."""


def variants(rows: int, shape: ExpertShape, device: DeviceLimits) -> Iterator[Variant]:
    """The step as it is, and those that differ in one thing."""
    make = partial(OtherExperts, rows=rows, adapters=False, urgency=0)
    yield make("everything")
    if rows == 1:
        for name, cuts in _PRODUCTS.items():
            for cut in cuts:
                yield make(f"{name} {cut}", cut=((name, SkinnyConfig("vector", *cut)),))
    if rows > _MOST_STREAMED:
        return
    now = choose(1, shape, device)
    if not isinstance(now, Streamed):
        raise TypeError("one row is streamed")
    for megabytes in _MEGABYTES:
        yield make(f"streamed, prefetch {megabytes} MB", experts=replace(now, prefetch=megabytes * 10**6))
    for tile in _GATE_UP:
        yield make(f"gate_up {tile}", experts=replace(now, gate_up=StreamTile(*tile)))
    for tile in _DOWN:
        yield make(f"down {tile}", experts=replace(now, down=StreamTile(*tile)))


def _step(config: Qwen3_5Config, rows: int, kind: Quantization, device: torch.device, *, empty: bool) -> DecodeStep:
    return DecodeStep(config, device, rows=rows, context=600, quantization=kind, empty=empty)


def _compile(config: Qwen3_5MoeConfig, kind: Quantization, rows: int, index: int, device: torch.device) -> None:
    """One of _PROCESSES parts of all kernels."""
    step = _step(one_of_each(config), rows, kind, device, empty=True)
    shape = shape_of(kind, config)
    with one_share(index, _PROCESSES), no_products():
        for variant in variants(rows, shape, step.kernels.device):
            with suppress(Exception):  # reported when it is timed
                variant.launch(step)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="fp8")
    parser.add_argument("--shape", default="qwen3.5-35b-a3b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = family_config(config_of(options.shape))
    if not isinstance(config, Qwen3_5MoeConfig):
        parser.error(f"{options.shape} has no experts")
    work = [
        partial(_compile, config, options.quant, rows, index) for rows in options.rows for index in range(_PROCESSES)
    ]
    print(f"compiled in {precompile(work):.0f} s", flush=True)
    device = torch.device("cuda")
    step = _step(config, max(options.rows), options.quant, device, empty=False)
    timer, recorder = Timer(step), Recorder(options.out)
    for rows in options.rows:
        for variant in variants(rows, shape_of(options.quant, config), step.kernels.device):
            try:
                figures = timer.time(variant)
            except Exception as error:  # one variant that does not run must not end the others
                figures = {"failed": describe(error)}
                torch.cuda.synchronize()
            recorder.add(variant.key | figures)
            print(*recorder.rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
