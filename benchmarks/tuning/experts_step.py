"""Times a decode step of the 35B-A3B shape with and without what its experts' cut can ask for ahead.

``python -m benchmarks.tuning.experts_step --out FILE`` on a GPU: layers and head with random weights, captured as a
CUDA graph for each number of rows; again with each number of bytes that are asked of L2 while the router decides
(kernels.gpu.experts.configs.Streamed), replayed in turn with the step as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.launches import no_products
from benchmarks.lib.precompile import precompile
from benchmarks.lib.random_checkpoint import config_of, family_config
from benchmarks.lib.recorder import Recorder
from benchmarks.tuning.step.decode_step import DecodeStep, one_of_each
from benchmarks.tuning.step.sweep import Timer
from benchmarks.tuning.step.variants import Variant
from kernels.gpu.experts.configs import Cut, ExpertShape, Streamed, choose
from kernels.gpu.launch.device import DeviceLimits
from services.engine.models.footprint import Quantization
from services.engine.models.qwen3_5 import fused_experts
from services.engine.models.qwen3_5.config import Qwen3_5Config


@dataclass(frozen=True, slots=True)
class Prefetched(Variant):
    """A step that asks L2 for other numbers of bytes."""

    prefetch: int | None = None
    """None: as many as the cut says."""

    def launch(self, step: DecodeStep) -> Tensor:
        with _prefetching(self.prefetch):
            return Variant.launch(self, step)


@contextmanager
def _prefetching(most: int | None) -> Iterator[None]:
    def chosen(rows: int, shape: ExpertShape, device: DeviceLimits) -> Cut:
        cut = choose(rows, shape, device)
        return replace(cut, prefetch=most) if most is not None and isinstance(cut, Streamed) else cut

    with patch.object(fused_experts, "choose", chosen):
        yield


def variants(rows: int, megabytes: list[int]) -> list[Variant]:
    whole: Variant = Variant("everything", rows, adapters=False, urgency=0)
    others = [Prefetched(f"prefetch {size} MB", rows, False, 0, prefetch=size * 10**6) for size in megabytes]
    return [whole, *others]


def _step(config: Qwen3_5Config, rows: int, kind: Quantization, device: torch.device, *, empty: bool) -> DecodeStep:
    return DecodeStep(config, device, rows=rows, context=600, quantization=kind, empty=empty)


def _compile(
    config: Qwen3_5Config, kind: Quantization, counts: list[int], sizes: list[int], device: torch.device
) -> None:
    step = _step(one_of_each(config), max(counts), kind, device, empty=True)
    with no_products():
        for variant in (variant for rows in counts for variant in variants(rows, sizes)):
            variant.launch(step)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Any = lambda text: [int(part) for part in text.split(",")]  # noqa: E731 (a type of argparse)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8])
    parser.add_argument("--megabytes", type=numbers, default=[0, 3, 12, 26, 40], help="to ask L2 for")
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="fp8")
    parser.add_argument("--shape", default="qwen3.5-35b-a3b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = family_config(config_of(options.shape))
    work = [partial(_compile, config, options.quant, [rows], options.megabytes) for rows in options.rows]
    print(f"compiled in {precompile(work):.0f} s", flush=True)
    step = _step(config, max(options.rows), options.quant, torch.device("cuda"), empty=False)
    timer, recorder = Timer(step), Recorder(options.out)
    for rows in options.rows:
        for variant in variants(rows, options.megabytes):
            recorder.add(variant.key | timer.time(variant))
            print(*recorder.rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
