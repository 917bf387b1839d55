"""The sizes of a Gated DeltaNet mixer, read off the tensors that its kernels get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and their sizes. Columns of the mixer's projection: query | key | value (the convolution's channels), then
    z [value_size], b [value_heads] and a [value_heads]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @classmethod
    def of(cls, mixed: Tensor, projected: Tensor, state: Tensor) -> DeltaShape:
        """Shape from the convolution's output [T, conv_dim], the projections [T, width] and the pool of states
        [num_slots, value_heads, key_dim, value_dim].

        Raises:
            ValueError: they contradict each other, or rows are not contiguous.
        """
        _, heads, key_dim, value_dim = state.shape
        keys = mixed.shape[1] - heads * value_dim
        key_heads = keys // (2 * key_dim)
        if key_heads < 1 or keys != 2 * key_heads * key_dim or heads % key_heads:
            raise ValueError(f"{mixed.shape[1]} channels do not hold queries, keys and values of {tuple(state.shape)}")
        shape = cls(key_heads, heads, key_dim, value_dim)
        width = shape.conv_dim + shape.value_size + 2 * heads
        if projected.shape[1] != width:
            raise ValueError(f"projections qkv | z | b | a must be {width} wide, got {projected.shape[1]}")
        if mixed.stride(1) != 1 or projected.stride(1) != 1 or not state.is_contiguous():
            raise ValueError("gated delta rule: rows of the inputs and the states must be contiguous")
        return shape
