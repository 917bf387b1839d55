"""Products of a few rows with a large matrix, norm before and adapters, activation, residual after in one kernel.

Reference: ``F.linear`` around `kernels.rms_norm.rms_norm`, `kernels.activations.swiglu` and `kernels.lora`, weights
decoded by `kernels.quantize`.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.lora import Adapters, LoraRows, shape_of
from kernels.gpu.preparation import Rows, prepare
from kernels.gpu.skinny_configs import Kind, SkinnyConfig, choose
from kernels.gpu.skinny_int4 import MAX_ROWS as INT4_VECTOR_ROWS
from kernels.gpu.skinny_int4 import fixed_point, int4_vector_kernel
from kernels.gpu.skinny_kernels import dot_kernel, vector_kernel
from kernels.gpu.skinny_stream import stream_kernel
from kernels.gpu.skinny_tma import tile_descriptor, tma_kernel
from kernels.quantize import GROUP, Fp8Weight, Int4Weight

Weight = Tensor | Fp8Weight | Int4Weight
MAX_ROWS = 64
"""Most rows of x that one program takes."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMSNorm that x goes through before the product."""

    weight: Tensor
    """[K] float32, as used (Qwen3.5: 1 + w)."""
    eps: float


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Where programs that share K leave their sums. One serves all products of a stream, one after the other."""

    partials: Tensor
    """[any] float32."""
    counters: Tensor
    """[any] int32, zeros between kernels."""

    @classmethod
    def allocate(cls, device: torch.device | str, *, sums: int = 1 << 22, tiles: int = 4096) -> SplitWorkspace:
        return cls(
            torch.empty(sums, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
        )


def weight_kind(weight: Weight) -> Kind:
    if isinstance(weight, Tensor):
        return "none"
    return "fp8" if isinstance(weight, Fp8Weight) else "int4"


def skinny_linear(
    x: Tensor,
    weight: Weight,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    lora: LoraRows | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    block_m: int | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> Tensor:
    """``activation(norm(x) Wᵀ + adapters) + residual``, sums in float32.

    The norm is folded in: ``norm(x) Wᵀ = (x ∘ w) Wᵀ / sqrt(mean(x²) + eps)``, both sums in one pass; for the tma
    variant, unless its config says otherwise, a kernel of its own makes x ∘ w and Σx² (`kernels.gpu.preparation`; in
    float8 it quantizes too), the same that multiplies adapters' A with x. Nothing of the result depends on how
    programs are scheduled.

    Args:
        x: [M, K] bfloat16 or float32, last dimension contiguous.
        weight: [N, K] in x's dtype and contiguous, or quantized.
        norm: applied to x first.
        residual: [M, N] (N / 2 with swiglu), added last; may be ``out`` itself.
        swiglu: rows of the weight are gate | up, and ``silu(gate) · up`` is what is stored.
        lora: each row's adapter, added before the activation.
        out: where to write.
        out_dtype: x's dtype if None.
        config: how to cut the product up; chosen from the table if None.
        block_m: rows of x a program takes (not vector); the least power of two that holds them, at most 64, if None.
        workspace: for configs that split K; a fresh one if None, which costs a fill.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [M, N], or [M, N / 2] with swiglu.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows, inputs = x.shape
    outputs, expected = weight.shape
    kind = weight_kind(weight)
    if inputs != expected or x.stride(1) != 1 or (swiglu and outputs % 2):
        raise ValueError(f"skinny_linear: x {tuple(x.shape)} (contiguous rows) does not fit {outputs} x {expected}")
    if isinstance(weight, Tensor) and (weight.dtype != x.dtype or not weight.is_contiguous()):
        raise ValueError(f"skinny_linear: a contiguous weight of {x.dtype} is needed, got {weight.dtype}")
    width = outputs // 2 if swiglu else outputs
    if out is None:
        out = torch.empty(rows, width, dtype=out_dtype or x.dtype, device=x.device)
    if out.shape != (rows, width) or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"skinny_linear: out and residual must be [{rows}, {width}]")
    if rows == 0:
        return out
    chosen = config or choose(rows, outputs, inputs, kind, swiglu)
    if kind == "fp8" and chosen.variant == "dot" and chosen.block_k % GROUP:
        raise ValueError(f"skinny_linear: fp8 needs a block_k that {GROUP} divides, got {chosen.block_k}")
    if chosen.variant == "tma" and kind == "int4":
        raise ValueError("skinny_linear: int4 has no tma variant")
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    prepared = prepare(x, gain, rows=_rows_of(chosen, kind, gain), lora=lora, pdl=pdl)
    adapters, shape = None, None
    if lora is not None:
        adapters = Adapters(prepared.hidden, lora.b, lora.row_adapters, lora.active, lora.ranks)
        shape = shape_of(adapters, lora, chosen.slots)
    if prepared.x is not x:
        x, gain = prepared.x, None
    # What every variant is told.
    shared: dict[str, Any] = {
        "K": inputs,
        "BLOCK_N": chosen.block_n,
        "SWIGLU": swiglu,
        "LORA": shape,
        "INTERPRETED": triton.knobs.runtime.interpret,
        "PDL": pdl,
        "num_warps": chosen.warps,
        "launch_pdl": pdl,
    }
    values, scale, zero = _parts(weight)
    residual_stride = 0 if residual is None else residual.stride(0)
    tiles = triton.cdiv(outputs, chosen.block_n)
    if chosen.variant == "vector" and isinstance(weight, Int4Weight):
        if rows > INT4_VECTOR_ROWS or chosen.block_n < 8 or chosen.block_k < GROUP:
            raise ValueError(f"skinny_linear: int4 vector takes {INT4_VECTOR_ROWS} rows and 8 x {GROUP} at least")
        int4_vector_kernel[(tiles,)](
            fixed_point(x, gain, pdl=pdl),
            weight.packed.view(torch.int32),
            scale,
            zero,
            gain,
            residual,
            out,
            adapters,
            outputs,
            eps,
            residual_stride,
            out.stride(0),
            ROWS=rows,
            BLOCK_G=chosen.block_k // GROUP,
            **shared,
        )
        return out
    shared["KIND"] = _KINDS[kind]
    if chosen.variant == "vector":
        vector_kernel[(tiles,)](
            x,
            values,
            scale,
            gain,
            residual,
            out,
            adapters,
            outputs,
            eps,
            x.stride(0),
            residual_stride,
            out.stride(0),
            ROWS=rows,
            BLOCK_K=chosen.block_k,
            PREFETCH=chosen.prefetch,
            **shared,
        )
        return out
    if chosen.variant == "stream":
        words = chosen.block_k // _PARTS[kind]
        if words % (32 * chosen.warps) or chosen.block_n < 16:
            raise ValueError(f"skinny_linear: a stream of 16 rows and 32 words a warp at least, got {chosen}")
        narrow = block_m or max(8, min(MAX_ROWS, triton.next_power_of_2(rows)))
        stream_kernel[(tiles, triton.cdiv(rows, narrow))](
            x,
            values,
            scale,
            zero,
            gain,
            residual,
            out,
            adapters,
            rows,
            outputs,
            eps,
            x.stride(0),
            residual_stride,
            out.stride(0),
            BLOCK_M=narrow,
            BLOCK_K=chosen.block_k,
            WARPS=chosen.warps,
            AHEAD=chosen.stages,
            PREFETCH=chosen.prefetch,
            **shared,
        )
        return out
    block = block_m or min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, block)
    partials = counters = None
    if chosen.splits > 1:
        sums = tiles * row_tiles * chosen.splits * (chosen.block_n + 1) * block
        space = workspace or SplitWorkspace.allocate(x.device, sums=sums, tiles=tiles * row_tiles)
        if space.partials.numel() < sums or space.counters.numel() < tiles * row_tiles:
            raise ValueError(f"skinny_linear: the workspace must hold {sums} sums and {tiles * row_tiles} counters")
        partials, counters = space.partials, space.counters
    if chosen.variant == "tma":
        raw = weight.values if isinstance(weight, Fp8Weight) else values
        tma_kernel[(tiles, chosen.splits, row_tiles)](
            tile_descriptor(x, block, chosen.block_k),
            prepared.scale,
            prepared.squares,
            tile_descriptor(raw, chosen.block_n // (2 if swiglu else 1), chosen.block_k),
            raw,
            scale,
            gain,
            residual,
            out,
            adapters,
            partials,
            counters,
            rows,
            outputs,
            eps,
            residual_stride,
            out.stride(0),
            BLOCK_M=block,
            BLOCK_K=chosen.block_k,
            SPLITS=chosen.splits,
            STAGES=chosen.stages,
            STAGGER=chosen.stagger,
            PREFETCH=chosen.prefetch,
            **shared,
        )
        return out
    dot_kernel[(tiles, chosen.splits, row_tiles)](
        x,
        values,
        scale,
        zero,
        gain,
        residual,
        out,
        adapters,
        partials,
        counters,
        rows,
        outputs,
        eps,
        x.stride(0),
        residual_stride,
        out.stride(0),
        BLOCK_M=block,
        BLOCK_K=GROUP if kind == "int4" else chosen.block_k,
        SPLITS=chosen.splits,
        STAGES=chosen.stages,
        PREFETCH=chosen.prefetch,
        **shared,
    )
    return out


_KINDS: dict[Kind, int] = {"none": 0, "fp8": 1, "int4": 2}
_PARTS: dict[Kind, int] = {"none": 1, "fp8": 2, "int4": 4}
"""Numbers of a weight's word."""


def _parts(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(weight, Tensor):
        return weight, None, None
    if isinstance(weight, Fp8Weight):
        return weight.words(), weight.scale, None
    return weight.packed, weight.scale, weight.zero


def _rows_of(config: SkinnyConfig, kind: Kind, gain: Tensor | None) -> Rows:
    """The form of x that a variant multiplies."""
    if config.variant != "tma" or (kind == "none" and (gain is None or config.inside)):
        return "as they are"
    return "float8" if kind == "fp8" else "weighted"
