"""Products in float8 for many rows: activations quantized by row, multiplied on the float8 tensor cores.

Reference: `kernels.quantize` and ``F.linear`` on what it decodes. Activations go in the pair order of Fp8Weight.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.linear.preparation import prepare
from kernels.quantize import Fp8Weight


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Tile sizes of fp8_linear()."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    warps: int = 8
    stages: int = 4
    promote: bool = False
    """Add sums of 128 products in float32: the tensor cores add float8 products with about 14 bits. Without, sums of
    9,216 are 0.3 % off where rounding the factors to e4m3 costs 3.8 %, and take half the time."""
    row_tiles: int = 8
    """Row tiles that go over the columns together, so that L2 serves their weights."""


_SMALL = Fp8Config(block_n=128, block_k=64, stages=3)


def fp8_config(device: DeviceLimits) -> Fp8Config:
    """The configuration for a device."""
    return Fp8Config() if device.size == "wide" else _SMALL


def quantize_rows(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """``x[t] ≈ values[t] · scale[t]`` with scale = max |x[t]| / 448 (dynamic, by token).

    Args:
        x: [T, K] any float dtype, rows contiguous, K a multiple of 128.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        values [T, K] float8_e4m3fn in the order of Fp8Weight, and scale [T] float32.

    Raises:
        ValueError: shapes do not fit.
    """
    values, scale, *_ = prepare(x, rows="float8", pdl=pdl)
    return values, scale


@triton.jit
def _fp8_linear_kernel(
    x,
    x_scale,
    weight,
    scale,
    residual,
    out,
    M,
    N,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PROMOTE: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    band = tile // (ROW_TILES * tiles_n)
    high = tl.minimum(tiles_m - band * ROW_TILES, ROW_TILES)
    within = tile % (ROW_TILES * tiles_n)
    m = (band * ROW_TILES + within % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    right = weight + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = tl.load(left + start)
        b = tl.load(right + start)
        if INTERPRETED:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K if PROMOTE else None)
    acc *= tl.load(x_scale + m, mask=m < M, other=0.0)[:, None]
    acc *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        source = residual + m.to(tl.int64)[:, None] * residual_stride + n[None, :]
        acc += tl.load(source, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], acc.to(out.dtype.element_ty), mask=keep)


def fp8_linear(
    values: Tensor,
    x_scale: Tensor,
    weight: Fp8Weight,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """``(values · x_scale) Wᵀ + residual``, both factors in float8, sums in float32.

    Args:
        values: [T, K] float8_e4m3fn and x_scale [T] float32, from quantize_rows().
        residual: [T, N]; may be ``out`` itself.
        out: where to write.
        out_dtype: of a fresh result.
        config: how to cut the product up; fp8_config() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, N].

    Raises:
        ValueError: shapes do not fit.
    """
    rows, inputs = values.shape
    outputs, expected = weight.shape
    if inputs != expected or values.dtype != torch.float8_e4m3fn or x_scale.shape != (rows,):
        raise ValueError(f"fp8_linear: {values.dtype} {tuple(values.shape)} does not fit {outputs} x {expected}")
    if out is None:
        out = torch.empty(rows, outputs, dtype=out_dtype, device=values.device)
    if out.shape != (rows, outputs) or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"fp8_linear: out and residual must be [{rows}, {outputs}]")
    use = config or fp8_config(device or limits_of(values.device))
    if inputs % use.block_k:
        raise ValueError(f"fp8_linear: block_k {use.block_k} does not divide {inputs} inputs")
    if rows:
        _fp8_linear_kernel[(triton.cdiv(rows, use.block_m) * triton.cdiv(outputs, use.block_n),)](
            values,
            x_scale,
            weight.values,
            weight.scale,
            residual,
            out,
            rows,
            outputs,
            0 if residual is None else residual.stride(0),
            out.stride(0),
            K=inputs,
            BLOCK_M=use.block_m,
            BLOCK_N=use.block_n,
            BLOCK_K=use.block_k,
            ROW_TILES=use.row_tiles,
            PROMOTE=use.promote,
            STAGES=use.stages,
            INTERPRETED=triton.knobs.runtime.interpret,
            PDL=pdl,
            num_warps=use.warps,
            launch_pdl=pdl,
        )
    return out
