"""Rotary position embedding on the first dimensions of each head. Reference in plain torch.

For text, Qwen3.5's interleaved three-axis rotation (mrope) has equal positions on all axes and is plain rope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation that a model gives its queries and keys.

    Raises:
        ValueError: the frequencies are no float32 vector, or the scale is not positive.
    """

    frequencies: Tensor
    """[rotary_dim / 2] float32: radians a position, see inverse_frequencies() and yarn_frequencies()."""
    scale: float = 1.0
    """Factor of cosines and sines; what is not rotated is not scaled either."""

    def __post_init__(self) -> None:
        if self.frequencies.dim() != 1 or self.frequencies.dtype != torch.float32 or not self.scale > 0:
            raise ValueError(f"rotation: {self.frequencies.dtype} {tuple(self.frequencies.shape)}, scale {self.scale}")

    @property
    def half(self) -> int:
        """Number of pairs of dimensions that turn."""
        return self.frequencies.shape[0]


def inverse_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """[rotary_dim / 2] float32: ``theta^(-2i / rotary_dim)`` (Su et al., RoFormer, arXiv 2104.09864)."""
    return 1.0 / _periods(rotary_dim, theta)


def _periods(rotary_dim: int, theta: float) -> Tensor:
    return theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def yarn_frequencies(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """[rotary_dim / 2] float32: frequencies of a context that is ``factor`` times as long (Peng et al., YaRN, arXiv
    2309.00071, section 3.2).

    Pairs that turn more than ``beta_fast`` times within the original context keep their frequency, those that turn less
    than ``beta_slow`` times have it divided by the factor, and those between get a mixture.

    Args:
        truncate: the two ends of the mixture are whole pairs.
    """

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so many times in the original context."""
        return rotary_dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept, periods = 1 - ramp, _periods(rotary_dim, theta)
    # The order of the operations is that of transformers' modeling_rope_utils.py: then the results are equal.
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def rope_tables(positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, rotary_dim / 2] float32 and scaled, of int positions [T]."""
    angles = (positions.float().unsqueeze(-1) * rotation.frequencies).unsqueeze(1)
    return angles.cos() * rotation.scale, angles.sin() * rotation.scale


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
