"""Activations rounded to e4m3, as products of many rows with float8 matrices do it, in the plain forward.

Two forwards that differ a little round a number that lies near the middle of two differently, and the next product's
inputs then differ by a fortieth: noise of 1e-4 in the sums moves logits by a tenth of what all rounding does. So the
plain forward can be told what was chosen elsewhere. It checks that the choices are as near as its own would be, and
goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.gpu.linear import fp8
from kernels.quantize import FP8_MAX, Fp8Weight, dequantize_fp8, unpair
from services.engine.models.qwen3_5 import layers


@contextmanager
def recorded_roundings() -> Iterator[list[Tensor]]:
    """Fills with what `kernels.gpu.linear.fp8.quantize_rows` rounds to inside, float32 [T, K] in units of a row's
    scale: on a GPU first for a runner's trials, then for its steps."""
    prepare = fp8.prepare
    found: list[Tensor] = []

    def recording(*args: Any, **options: Any) -> Any:
        prepared = prepare(*args, **options)
        found.append(unpair(prepared.x.float()).cpu())
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "prepare", recording)
        yield found


@contextmanager
def rounded_activations(chosen: Sequence[Tensor] | None = None, *, allowed: float = 1.0) -> Iterator[list[int]]:
    """Inside, what the plain forward multiplies by its layers' matrices is rounded row by row; the list fills with how
    many rows that were.

    Args:
        chosen: from recorded_roundings(), one for each product of a step, which may be computed here in several parts:
            a row follows the chosen row that is nearest to it. None: each number goes to the nearest.
        allowed: how much farther, in the root mean square, choices may be from what is rounded here than the nearest
            numbers are: the two forwards differ before they round, too.
    """
    linear, addmm = F.linear, torch.addmm
    rounded = _Rounding(chosen, allowed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "F", SimpleNamespace(linear=lambda x, weight: linear(rounded(x), weight)))
        patch.setattr(torch, "addmm", lambda residual, x, weight: addmm(residual, rounded(x), weight))
        yield rounded.rows


@contextmanager
def rounded_prompts(chosen: Sequence[Tensor], *, allowed: float) -> Iterator[list[int]]:
    """Inside, the plain forward of a model that multiplies prompts in float8 rounds those rows as was chosen; arguments
    and result as of rounded_activations()."""
    rounded = _Rounding(chosen, allowed)

    def product(x: Tensor, weight: Fp8Weight) -> Tensor:
        return rounded(x) @ dequantize_fp8(weight, x.dtype).t()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "multiply_fp8", product)
        yield rounded.rows


class _Rounding:
    """Rounds the rows of one product after the other."""

    def __init__(self, chosen: Sequence[Tensor] | None, allowed: float) -> None:
        self._chosen, self._allowed = chosen, allowed
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.float().abs().amax(1, keepdim=True) / FP8_MAX
        number = x.float() / scale
        chosen = self._chosen
        following = None if chosen is None else chosen[len(self.rows) % len(chosen)].to(number.dtype)
        self.rows.append(len(x))
        code = _nearest(number)
        if following is not None:
            nearest = torch.cdist(number, following, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            assert (following[nearest] - number).norm() <= self._allowed * (code - number).norm()
            code = following[nearest]
        return (code * scale).to(x.dtype)


def _nearest(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
