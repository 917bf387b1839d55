"""Adapters at the shapes of Qwen3.5-4B, alone and within products, for tests.kernels.hopper."""

from __future__ import annotations

import torch

from kernels.gpu.linear.preparation import shrink
from kernels.gpu.linear.skinny import Convolution, Norm, Scaled, skinny_add, skinny_linear
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from kernels.gpu.lora.expand import expand_add, expand_swiglu
from kernels.gpu.lora.rows import LoraRows
from tests.kernels.gpu.linear.compile_cases import weight

GROUPS = {
    "in, DeltaNet": (2560, (8192, 12288, 12320, 12352)),
    "in, attention": (2560, (8192, 9216, 10240)),
    "out": (4096, (2560,)),
    "gate_up": (2560, (9216, 18432)),
    "down": (9216, (2560,)),
}
"""Input width and ends of the targets."""


def rows_of(group: str, rows: int, *, slots: int = 10, rank: int = 32) -> LoraRows:
    """Empty adapters of a group."""
    depth, ends = GROUPS[group]
    return LoraRows(
        torch.empty(slots, len(ends), rank, depth, dtype=torch.bfloat16),
        torch.empty(slots, rank, ends[-1], dtype=torch.bfloat16),
        ends,
        torch.empty(slots, dtype=torch.int32),
        torch.empty(rows, dtype=torch.int32),
        torch.empty(1 + min(rows, slots), dtype=torch.int32),
    )


def linear(group: str, rows: int, kind: str = "none", config: SkinnyConfig | None = None) -> None:
    """A product with adapters as the engine launches it."""
    depth, ends = GROUPS[group]
    x, lora = torch.empty(rows, depth, dtype=torch.bfloat16), rows_of(group, rows)
    matrix = weight(kind, ends[-1], depth)
    if group in ("out", "down"):
        stream = torch.empty(rows, ends[-1], dtype=torch.bfloat16)
        skinny_add(stream, x, matrix, lora=lora, ahead=Norm(torch.empty(ends[-1]), 1e-6), config=config, pdl=True)
    else:
        scaled, conv = Scaled(x, torch.empty(40, rows), 1e-6), None
        if group == "in, DeltaNet" and rows <= 32:
            taps = torch.empty(4, 8192, dtype=torch.bfloat16)
            conv = Convolution(torch.empty(4, 3, 8192, dtype=x.dtype), taps, torch.empty(rows, dtype=torch.int32))
        skinny_linear(scaled, matrix, swiglu=group == "gate_up", lora=lora, conv=conv, config=config, pdl=True)


def launches() -> None:
    for group, (depth, ends) in GROUPS.items():
        for rows in (1, 16, 64, 256, 8192):
            lora = rows_of(group, rows)
            x = torch.empty(rows, depth, dtype=torch.bfloat16)
            h = shrink(x, lora, pdl=rows <= 64)
            product = torch.empty(rows, ends[-1], dtype=torch.bfloat16)
            expand_add(h, lora, product, pdl=rows <= 64)
            if group == "gate_up":
                expand_swiglu(h, lora, product, pdl=True)
    for group in ("in, DeltaNet", "out", "gate_up", "down"):
        for rows in (1, 8, 64):
            linear(group, rows)
        linear(group, 1, "fp8")
        linear(group, 8, "fp8")
    linear("gate_up", 64, config=SkinnyConfig("dot", 64, 128, 4, 3, slots=4))
    for group in ("gate_up", "down"):
        linear(group, 64, "fp8")
    for rows in (1, 4):
        linear("down", rows, "int4", SkinnyConfig("vector", 16, 1024, 8))
