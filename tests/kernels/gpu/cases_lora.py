"""The launches of kernels/gpu/lora.py at the shapes of Qwen3.5-4B, for tests.kernels.hopper."""

from __future__ import annotations

import torch

from kernels.gpu.lora import LoraRows, expand_add, shrink

GROUPS = {
    "in, DeltaNet": (2560, (8192, 12288, 12320, 12352)),
    "in, attention": (2560, (8192, 9216, 10240)),
    "out": (4096, (2560,)),
    "gate_up": (2560, (9216, 18432)),
    "down": (9216, (2560,)),
}
"""Input width and ends of the targets."""


def rows_of(group: str, rows: int, *, slots: int = 9, rank: int = 16) -> LoraRows:
    """Empty adapters of a group."""
    depth, ends = GROUPS[group]
    return LoraRows(
        torch.empty(slots, len(ends), rank, depth, dtype=torch.bfloat16),
        torch.empty(slots, rank, ends[-1], dtype=torch.bfloat16),
        ends,
        torch.empty(slots, dtype=torch.int32),
        torch.empty(rows, dtype=torch.int32),
        torch.empty(slots, dtype=torch.int32),
    )


def launches() -> None:
    for group, (depth, ends) in GROUPS.items():
        for rows in (1, 64, 512, 8192):
            lora = rows_of(group, rows)
            x = torch.empty(rows, depth, dtype=torch.bfloat16)
            norm = torch.empty(depth) if group in ("in, DeltaNet", "gate_up") and rows <= 64 else None
            h = shrink(x, lora, norm, pdl=rows <= 64)
            expand_add(h, lora, torch.empty(rows, ends[-1], dtype=torch.bfloat16), pdl=rows <= 64)
