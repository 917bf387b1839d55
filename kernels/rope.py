"""Rotary position embedding on the first dimensions of each head. Reference in plain torch.

For text, Qwen3.5's interleaved three-axis rotation (mrope) has equal positions on all axes and is plain rope.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """[rotary_dim / 2] float32: ``theta^(-2i / rotary_dim)`` (Su et al., RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / theta**exponents).to(device)


def rope_tables(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, rotary_dim / 2] float32, of int positions [T]."""
    angles = (positions.float().unsqueeze(-1) * inverse).unsqueeze(1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + rotary_dim/2) of each head; the rest of the head passes through.

    Args:
        x: [T, heads, head_dim].
        cos, sin: [T, 1, rotary_dim / 2] float32.

    Returns:
        [T, heads, head_dim] in x's dtype.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
