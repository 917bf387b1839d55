"""Pages of keys and values of full-attention layers, in the model's dtype or as e4m3 with scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""Largest finite e4m3 number (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433)."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """Position ``p`` of a sequence lies in its block table's block ``p // block_size`` at ``p % block_size``. Block 0
    is scratch.

    Raises:
        ValueError: the tensors contradict each other.
    """

    keys: Tensor
    """[num_blocks, block_size, kv_heads, head_dim], model dtype or float8_e4m3fn."""
    values: Tensor
    """Like keys."""
    key_scales: Tensor | None = None
    """[num_blocks, block_size, kv_heads] float32, only with float8_e4m3fn: ``amax / 448`` of that token and head."""
    value_scales: Tensor | None = None
    """Like key_scales."""

    def __post_init__(self) -> None:
        shape, scales = self.keys.shape, (self.key_scales, self.value_scales)
        if len(shape) != 4 or self.values.shape != shape or self.values.dtype != self.keys.dtype:
            raise ValueError(f"KvPages: keys {tuple(shape)}, values {tuple(self.values.shape)} must be alike and 4-D")
        if not (self.keys.is_contiguous() and self.values.is_contiguous()):
            raise ValueError("KvPages: keys and values must be contiguous")
        if [x is not None for x in scales] != [self.quantized] * 2:
            raise ValueError("KvPages: float8_e4m3fn pages have both scales, other pages none")
        for scale in scales:
            if scale is not None and (scale.shape != shape[:3] or not scale.is_contiguous()):
                raise ValueError(f"KvPages: scales {tuple(scale.shape)} must be contiguous {tuple(shape[:3])}")

    @property
    def quantized(self) -> bool:
        return self.keys.dtype == torch.float8_e4m3fn

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KvPages:
        """Zeroed pages; scales too if ``dtype`` is float8_e4m3fn."""
        (pages,) = StackedPages.allocate(1, num_blocks, block_size, kv_heads, head_dim, dtype, device).layers()
        return pages

    @staticmethod
    def bytes_per_block(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that allocate() takes for one block: keys, values and their scales."""
        scale = 4 if dtype == torch.float8_e4m3fn else 0
        return 2 * block_size * kv_heads * (head_dim * dtype.itemsize + scale)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values as float32, for references and tests."""
        keys, values = self.keys.float(), self.values.float()
        if self.key_scales is not None and self.value_scales is not None:
            keys, values = keys * self.key_scales.unsqueeze(-1), values * self.value_scales.unsqueeze(-1)
        return keys, values


@dataclass(frozen=True, slots=True)
class StackedPages:
    """The pages of several layers, so that one kernel reaches a block of all of them."""

    pages: Tensor
    """[2, layers, num_blocks, block_size, kv_heads, head_dim], contiguous: keys and values."""
    scales: Tensor | None
    """[2, layers, num_blocks, block_size, kv_heads] float32, only with float8_e4m3fn."""

    @classmethod
    def allocate(
        cls,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> StackedPages:
        """Zeroed."""
        places = (2, layers, num_blocks, block_size, kv_heads)
        # Through bytes: zeros of float8 need no fill kernel of their own type.
        zeros = torch.zeros(math.prod(places) * head_dim * dtype.itemsize, dtype=torch.uint8, device=device)
        scales = None
        if dtype == torch.float8_e4m3fn:
            scales = torch.zeros(places, dtype=torch.float32, device=device)
        return cls(zeros.view(dtype).view(*places, head_dim), scales)

    def layers(self) -> tuple[KvPages, ...]:
        """Pages of each layer, views of these."""
        keys, values = self.pages
        if self.scales is None:
            return tuple(KvPages(*layer) for layer in zip(keys, values, strict=True))
        return tuple(KvPages(*layer) for layer in zip(keys, values, *self.scales, strict=True))

    def pools(self) -> tuple[Tensor, ...]:
        """All tensors as bytes, [2 · layers, num_blocks, bytes of a block]: all layers' keys, then their values."""
        tensors = (self.pages,) if self.scales is None else (self.pages, self.scales)
        return tuple(x.flatten(3).view(torch.uint8).flatten(0, 1) for x in tensors)


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of what is written to e4m3 pages: symmetric, one scale a token and head.

    Args:
        x: [..., head_dim] any float dtype.

    Returns:
        e4m3 [..., head_dim] and its scale [...] float32: ``amax / 448``, 1 where all is zero.
    """
    amax = x.float().abs().amax(-1)
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    return (x.float() / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
