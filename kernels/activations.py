"""The gated activation of the MLP."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) · up`` (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202).

    Args:
        gate_up: [..., 2 · d], gate first.

    Returns:
        [..., d] in the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
