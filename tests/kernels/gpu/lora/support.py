"""Adapters of a step for tests of the kernels that add them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.gpu.lora.rows import LoraRows, active_slots


def random_rows(
    slots: Sequence[int],
    ranks: Sequence[int],
    ends: tuple[int, ...],
    depth: int,
    device: torch.device,
    *,
    largest: int = 16,
) -> LoraRows:
    """Rows of these slots, of adapters of these ranks (of slot 0 too: 0).

    Args:
        ends: one past the last output of each target.
        depth: inputs.
        largest: the rank that there is storage for.
    """

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return LoraRows(
        a=torch.randn(len(ranks), len(ends), largest, depth, device=device) / depth**0.5,
        b=torch.randn(len(ranks), largest, ends[-1], device=device) / largest**0.5,
        ends=ends,
        ranks=ints(ranks),
        row_adapters=ints(slots),
        active=ints(active_slots(slots, len(ranks) - 1)),
    )
