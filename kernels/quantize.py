"""Weight quantization without calibration, and its inverse: float8 by row, 4-bit integers by group. Plain torch.

Both keep the shape [out, in] of a linear layer's matrix; activations stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128
"""Consecutive inputs that share a scale and a zero point in int4."""
FP8_MAX = 448.0
"""Largest float8_e4m3fn (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433)."""
_QUARTER = GROUP // 4
_LEVELS = 15
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Clipping a group's range trades its outliers' error for finer steps; the best of these by squared error is taken."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``W[n, k] ≈ values[n, place(k)] · scale[n]``.

    place() lays out each run of 128 inputs as 64 pairs of inputs that are 64 apart, so that taking the first of the
    pair of each 16-bit word makes neighbours at once. A product with activations in the same order needs nothing else.

    Raises:
        ValueError: the shapes or dtypes contradict each other.
    """

    values: Tensor
    """[N, K] float8_e4m3fn, contiguous, K a multiple of 128."""
    scale: Tensor
    """[N] float32: the row's largest magnitude over 448."""

    def __post_init__(self) -> None:
        if self.values.dtype != torch.float8_e4m3fn or self.scale.shape != self.values.shape[:1]:
            raise ValueError(f"fp8 weight: {self.values.dtype} {tuple(self.values.shape)}, {tuple(self.scale.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scale

    def words(self) -> Tensor:
        """The values as [N, K / 2] int16."""
        return self.values.view(torch.int16)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``W[n, 128 g + 32 i + c] ≈ (q - zero[g, n]) · scale[g, n]`` with q = bits 4 i … 4 i + 3 of packed[g, n, c].

    Groups come first, so that what consecutive rows need of a group is contiguous; the four numbers of a word are 32
    inputs apart, so that taking one of each of two words makes two neighbours at once.

    Raises:
        ValueError: the shapes or dtypes contradict each other.
    """

    packed: Tensor
    """[K / 128, N, 32] int16."""
    scale: Tensor
    """[K / 128, N] bfloat16."""
    zero: Tensor
    """[K / 128, N] uint8, 0 … 15."""

    def __post_init__(self) -> None:
        groups = self.packed.shape[:2]
        if self.packed.dtype != torch.int16 or self.scale.shape != groups or self.zero.shape != groups:
            raise ValueError(f"int4 weight: {tuple(self.packed.shape)}, {tuple(self.scale.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0] * GROUP

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed, self.scale, self.zero


def pair(x: Tensor) -> Tensor:
    """[T, K] with the inputs in the order of Fp8Weight."""
    return x.reshape(-1, x.shape[1] // GROUP, 2, GROUP // 2).transpose(2, 3).reshape(x.shape)


def unpair(x: Tensor) -> Tensor:
    """The inverse of pair()."""
    return x.view(-1, x.shape[1] // GROUP, GROUP // 2, 2).transpose(2, 3).reshape(x.shape)


def multiply_groups(values: Tensor, scale: Tensor, width: int) -> None:
    """Multiplies groups of numbers of each row with their scales, in place; products are rounded to values' dtype.

    Args:
        values: [N, K].
        scale: [N, ceil(K / width)] float32, on the same device.
        width: neighbours in a row that share a scale; the last group may have fewer.
    """
    for group, part in enumerate(torch.split(values, width, 1)):
        part.mul_(scale[:, group, None])


def quantize_fp8(weight: Tensor, least: Tensor | None = None) -> Fp8Weight:
    """Each row scaled to the range of e4m3 and rounded to nearest.

    Args:
        weight: [N, K] any float dtype, K a multiple of 128.
        least: [N] float32, smallest scale of each row: where it is the scale that a row's numbers came from, they are
            stored as they were, whether or not the row reaches the end of the range.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"fp8: {weight.shape[1]} inputs are not a multiple of {GROUP}; use none")
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = weight[begin : begin + _ROWS_AT_ONCE].float()
        factor = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
        if least is not None:
            factor = torch.maximum(factor, least[begin : begin + _ROWS_AT_ONCE])
        scale[begin : begin + _ROWS_AT_ONCE] = factor
        scaled = pair(rows / factor[:, None]).clamp_(-FP8_MAX, FP8_MAX)
        values[begin : begin + _ROWS_AT_ONCE] = scaled.to(values.dtype)
    return Fp8Weight(values, scale)


def dequantize_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in dtype; some thousand rows at a time, which keeps the float32 numbers few."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        out[rows] = unpair(weight.values[rows].float() * weight.scale[rows, None])
    return out


def multiply_fp8(x: Tensor, weight: Fp8Weight) -> Tensor:
    """``x Wᵀ`` [T, N] in x's dtype, x rounded to e4m3 as well, scaled by row as it comes; sums in float32.

    Args:
        x: [T, K] any float dtype.
    """
    rows = x.float()
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / FP8_MAX
    values = pair(rows / scale).clamp_(-FP8_MAX, FP8_MAX).to(weight.values.dtype).float()
    return (values @ weight.values.float().t() * scale * weight.scale).to(x.dtype)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Asymmetric round to nearest by group, the group's range clipped where that lowers its squared error.

    Args:
        weight: [N, K] any float dtype, K a multiple of 128.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    count, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"int4: {inputs} inputs are not a multiple of the group of {GROUP}; use fp8 or none")
    groups = inputs // GROUP
    packed = torch.empty(groups, count, _QUARTER, dtype=torch.int16, device=weight.device)
    scale = torch.empty(groups, count, dtype=torch.bfloat16, device=weight.device)
    zero = torch.empty(groups, count, dtype=torch.uint8, device=weight.device)
    for begin in range(0, count, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, count)
        rows = weight[begin:end].float().view(-1, groups, GROUP)
        q, factor, offset = _round_groups(rows)
        parts = q.view(-1, groups, 4, _QUARTER)
        word = parts[:, :, 0] | parts[:, :, 1] << 4 | parts[:, :, 2] << 8 | parts[:, :, 3] << 12
        # int32 to int16 keeps the low 16 bits, which is what is wanted of words above 32767.
        packed[:, begin:end] = word.to(torch.int16).transpose(0, 1)
        scale[:, begin:end] = factor.squeeze(-1).t().to(torch.bfloat16)
        zero[:, begin:end] = offset.squeeze(-1).t().to(torch.uint8)
    return Int4Weight(packed, scale, zero)


def _round_groups(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, groups, 128] float32 to whole numbers 0 … 15 (int32), scale and zero point [n, groups, 1] (float32)."""
    # The range always holds zero, so that a zero weight stays zero and the zero point fits four bits.
    low, high = rows.amin(-1, keepdim=True).clamp_max(0.0), rows.amax(-1, keepdim=True).clamp_min(0.0)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for shrink in _SHRINKS:
        # Rounded to its stored form first: then its rounding costs nothing.
        scale = ((high - low) * (shrink / _LEVELS)).clamp_min(1e-30).to(torch.bfloat16).float()
        zero = (-low * shrink / scale).round_().clamp_(0, _LEVELS)
        q = (rows / scale + zero).round_().clamp_(0, _LEVELS)
        error = ((q - zero) * scale - rows).square_().sum(-1, keepdim=True)
        if best is None:
            best = error, q, scale, zero
        else:
            better = error < best[0]
            new = (error, q, scale, zero)
            best = (
                torch.where(better, new[0], best[0]),
                torch.where(better, new[1], best[1]),
                torch.where(better, new[2], best[2]),
                torch.where(better, new[3], best[3]),
            )
    if best is None:
        raise ValueError("int4: no candidates for the range")
    return best[1].to(torch.int32), best[2], best[3]


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in dtype; some thousand rows at a time."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        words = weight.packed[:, rows].to(torch.int32)
        groups, count, _ = words.shape
        q = torch.stack([(words >> (4 * i)) & 15 for i in range(4)], dim=2).view(groups, count, GROUP)
        values = (q - weight.zero[:, rows].to(torch.int32)[:, :, None]).float() * weight.scale[:, rows, None].float()
        out[rows] = values.transpose(0, 1).reshape(count, groups * GROUP)
    return out
