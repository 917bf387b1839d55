"""Times a decode step with more and fewer bytes asked of L2 while the delta rule's step runs.

``python -m benchmarks.tuning.lookahead_step --shape qwen3.5-0.8b --out FILE`` on a GPU, as benchmarks.tuning.step.sweep
times its variants.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from kernels.gpu.configs import KernelConfigs
from services.engine.models.footprint import Quantization
from services.engine.models.qwen3_5.config import Qwen3_5Config


@dataclass(frozen=True, slots=True)
class Asking(Variant):
    """A step that asks for other numbers of bytes."""

    most: int = 0

    def launch(self, step: DecodeStep) -> Tensor:
        with patch.object(KernelConfigs, "lookahead", lambda *_: self.most):
            return Variant.launch(self, step)


def variants(rows: int, megabytes: list[int]) -> list[Variant]:
    return [
        Variant("everything", rows, adapters=False, urgency=0),
        *(Asking(f"{size} MB", rows, False, 0, most=size * 10**6) for size in megabytes),
    ]


def _step(config: Qwen3_5Config, rows: int, kind: Quantization, device: torch.device, *, empty: bool) -> DecodeStep:
    return DecodeStep(config, device, rows=rows, context=600, quantization=kind, empty=empty)


def _compile(config: Qwen3_5Config, kind: Quantization, rows: int, sizes: list[int], device: torch.device) -> None:
    step = _step(one_of_each(config), rows, kind, device, empty=True)
    with no_products():
        for variant in variants(rows, sizes):
            variant.launch(step)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument(
        "--megabytes", type=lambda text: [int(part) for part in text.split(",")], default=[0, 4, 8, 12, 16, 24]
    )
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = family_config(config_of(options.shape))
    sizes = options.megabytes
    work = [partial(_compile, config, options.quant, rows, sizes) for rows in options.rows]
    print(f"compiled in {precompile(work):.0f} s", flush=True)
    step = _step(config, max(options.rows), options.quant, torch.device("cuda"), empty=False)
    timer, recorder = Timer(step), Recorder(options.out)
    for rows in options.rows:
        for variant in variants(rows, sizes):
            recorder.add(variant.key | timer.time(variant))
            print(options.shape, *recorder.rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
