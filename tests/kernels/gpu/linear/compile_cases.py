"""The linear layers of the 4B shape as the engine launches them, for tests/kernels/gpu/test_compiles.py."""

from __future__ import annotations

import torch

from kernels.gpu.linear.fp8 import fp8_linear, quantize_rows
from kernels.gpu.linear.int4 import dequantize
from kernels.gpu.linear.skinny import Convolution, Norm, Weight, skinny_add, skinny_linear
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from kernels.quantize import Fp8Weight, Int4Weight

HIDDEN, INTERMEDIATE = 2560, 9216


def weight(kind: str, outputs: int, inputs: int) -> Weight:
    if kind == "none":
        return torch.empty(outputs, inputs, dtype=torch.bfloat16)
    if kind == "fp8":
        return Fp8Weight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs))
    groups = inputs // 128
    return Int4Weight(
        torch.empty(groups, outputs, 32, dtype=torch.int16),
        torch.empty(groups, outputs, dtype=torch.bfloat16),
        torch.empty(groups, outputs, dtype=torch.uint8),
    )


def rows(count: int, width: int) -> torch.Tensor:
    return torch.empty(count, width, dtype=torch.bfloat16)


def launches() -> None:
    norm = Norm(torch.empty(HIDDEN), 1e-6)
    for kind in ("none", "fp8", "int4"):
        for count in (1, 16):
            taps, slots = torch.empty(4, 8192, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int32)
            conv = Convolution(torch.empty(4, 3, 8192, dtype=torch.bfloat16), taps, slots)
            skinny_linear(rows(count, HIDDEN), weight(kind, 12352, HIDDEN), norm=norm, conv=conv, pdl=True)
        for count in (1, 16, 64):
            down = weight(kind, HIDDEN, INTERMEDIATE)
            scaled = skinny_add(rows(count, HIDDEN), rows(count, INTERMEDIATE), down, ahead=norm, pdl=True)
            if scaled is not None:
                skinny_linear(scaled, weight(kind, 2 * INTERMEDIATE, HIDDEN), swiglu=True, pdl=True)
    for kind, stagger in (("none", False), ("none", True), ("fp8", False)):
        tma = SkinnyConfig("tma", 128, 128, warps=4, stages=3, splits=2, prefetch=512, stagger=stagger)
        skinny_linear(
            rows(16, HIDDEN), weight(kind, 2 * INTERMEDIATE, HIDDEN), norm=norm, swiglu=True, config=tma, pdl=True
        )
    for count in (1, 2, 4, 8):
        gate_up = weight("int4", 2 * INTERMEDIATE, HIDDEN)
        skinny_linear(rows(count, HIDDEN), gate_up, norm=norm, swiglu=True, pdl=True)
        if count == 2:
            down = weight("int4", HIDDEN, INTERMEDIATE)
            skinny_add(rows(count, HIDDEN), rows(count, INTERMEDIATE), down, ahead=norm, pdl=True)
        if count >= 4:
            skinny_linear(rows(count, HIDDEN), weight("int4", 12352, HIDDEN), norm=norm, pdl=True)
            skinny_add(rows(count, HIDDEN), rows(count, 4096), weight("int4", HIDDEN, 4096), ahead=norm, pdl=True)
    dequantize(weight("int4", HIDDEN, INTERMEDIATE), torch.bfloat16)  # type: ignore[arg-type]
    values, scale = quantize_rows(rows(512, HIDDEN), pdl=True)
    fp8_linear(values, scale, weight("fp8", 2 * INTERMEDIATE, HIDDEN), pdl=True)  # type: ignore[arg-type]
