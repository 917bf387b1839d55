"""Products of a few rows with a large matrix; adapters, activation, residual and the next norm's start in one kernel.

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

from kernels.gpu.delta.conv1d import Decodes
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.linear.preparation import Prepared, Rows, prepare
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig, choose, starts_early
from kernels.gpu.linear.skinny_configs import invariant as invariant_config
from kernels.gpu.linear.skinny_int4 import MAX_ROWS as INT4_VECTOR_ROWS
from kernels.gpu.linear.skinny_int4 import TILE as INT4_VECTOR_TILE
from kernels.gpu.linear.skinny_int4 import int4_vector_kernel
from kernels.gpu.linear.skinny_kernels import dot_kernel, vector_kernel
from kernels.gpu.linear.skinny_parts import Around
from kernels.gpu.linear.skinny_stream import stream_kernel
from kernels.gpu.linear.skinny_tma import tile_descriptor, tma_kernel
from kernels.gpu.lora.batch import Adapters, shape_of
from kernels.gpu.lora.rows import LoraRows
from kernels.quantize import GROUP, Fp8Weight, Int4Weight

Weight = Tensor | Fp8Weight | Int4Weight
MAX_ROWS = 64
"""Most rows of x that one program takes."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm before a product."""

    weight: Tensor
    """[K] float32, as used (Qwen3.5: 1 + w)."""
    eps: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows x on their way through a norm: ``norm(x) = values / sqrt(mean(x²) + eps)``. The division is left to the end
    of the product, whose factor it is: so a product can make this of its result while it has only a part of each row,
    and what multiplies with it next needs nothing but ``values``."""

    values: Tensor
    """[T, K]: x times the norm's weight, rounded to x's dtype."""
    squares: Tensor
    """[parts, T] float32: the sum of squares of each row of x, in parts."""
    eps: float

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, width


@dataclass(frozen=True, slots=True)
class Convolution:
    """A step of a causal depthwise convolution with SiLU over a product's first columns, each row the next token of a
    sequence; see kernels.gpu.delta.conv1d.conv_decode."""

    state: Tensor
    """[num_slots, kernel - 1, channels] contiguous, in the result's dtype; moves on in place."""
    weight: Tensor
    """[kernel, channels]."""
    slots: Tensor
    """[M] int32."""


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Workspace in which programs that share K leave their sums. One serves all products of a stream, one after the
    other."""

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
    x: Tensor | Scaled,
    weight: Weight,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    lora: LoraRows | None = None,
    conv: Convolution | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    block_m: int | None = None,
    invariant: bool = False,
    workspace: SplitWorkspace | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """``activation(norm(x) Wᵀ + adapters) + residual``, sums in float32. Nothing of the result depends on how programs
    are scheduled.

    Args:
        x: [M, K] bfloat16 or float32, last dimension contiguous; or what skinny_add() made ready for its norm.
        weight: [N, K] in x's dtype and contiguous, or quantized.
        norm: applied to x first, if x is a tensor: a kernel of its own makes it Scaled
            (`kernels.gpu.linear.preparation`).
        residual: [M, N] (N / 2 with swiglu), added last; may be ``out`` itself.
        swiglu: rows of the weight are gate | up, and ``silu(gate) · up`` is what is stored.
        lora: each row's adapter, added before the activation.
        conv: convolution of the first columns, with adapters and without residual and swiglu. They are rounded to the
            result's dtype first: the same as conv_decode() of the result.
        out: where to write.
        out_dtype: x's dtype if None.
        config: how to cut the product up; chosen from the table if None.
        block_m: rows of x a program takes (not vector); the least power of two that holds them, at most 64, if None.
        invariant: cut up in the one way for all numbers of rows, in place of ``config`` and ``block_m``.
        workspace: for configs that split K; a fresh one if None, which costs a fill.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [M, N], or [M, N / 2] with swiglu.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    given = x.values if isinstance(x, Scaled) else x
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = torch.empty(given.shape[0], width, dtype=out_dtype or given.dtype, device=given.device)
    _multiply(
        x,
        weight,
        out,
        residual=residual,
        norm=norm,
        swiglu=swiglu,
        lora=lora,
        conv=conv,
        config=config,
        block_m=block_m,
        invariant=invariant,
        workspace=workspace,
        device=device,
        pdl=pdl,
    )
    return out


def skinny_add(
    stream: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    lora: LoraRows | None = None,
    ahead: Norm | None = None,
    config: SkinnyConfig | None = None,
    block_m: int | None = None,
    invariant: bool = False,
    workspace: SplitWorkspace | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Scaled | None:
    """``stream += x Wᵀ + adapters`` in place; arguments as of skinny_linear().

    Args:
        stream: [M, N].
        ahead: the norm that reads the stream next.

    Returns:
        The new stream made ready for that norm; None without one.
    """
    return _multiply(
        x,
        weight,
        stream,
        residual=stream,
        ahead=ahead,
        lora=lora,
        config=config,
        block_m=block_m,
        invariant=invariant,
        workspace=workspace,
        device=device,
        pdl=pdl,
    )


def _multiply(
    x: Tensor | Scaled,
    weight: Weight,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    ahead: Norm | None = None,
    swiglu: bool = False,
    lora: LoraRows | None = None,
    conv: Convolution | None = None,
    config: SkinnyConfig | None,
    block_m: int | None,
    invariant: bool,
    workspace: SplitWorkspace | None,
    device: DeviceLimits | None,
    pdl: bool,
) -> Scaled | None:
    rows, inputs = x.shape
    outputs, expected = weight.shape
    kind = weight_kind(weight)
    scaled = x if isinstance(x, Scaled) else None
    source = x.values if isinstance(x, Scaled) else x
    width = outputs // 2 if swiglu else outputs
    if inputs != expected or source.stride(1) != 1 or (swiglu and outputs % 2) or (scaled is not None and norm):
        raise ValueError(f"skinny_linear: x {(rows, inputs)} (contiguous rows) does not fit {outputs} x {expected}")
    if isinstance(weight, Tensor) and (weight.dtype != source.dtype or not weight.is_contiguous()):
        raise ValueError(f"skinny_linear: a contiguous weight of {source.dtype} is needed, got {weight.dtype}")
    if out.shape != (rows, width) or (residual is not None and residual.shape != out.shape):
        raise ValueError(f"skinny_linear: out and residual must be [{rows}, {width}]")
    kernel = 0
    if conv is not None:
        kernel, channels = conv.weight.shape
        fits = conv.state.shape[1:] == (kernel - 1, channels) and conv.state.is_contiguous() and channels <= outputs
        if not fits or swiglu or residual is not None or conv.state.dtype != out.dtype or len(conv.slots) != rows:
            raise ValueError(f"skinny_linear: a convolution {tuple(conv.weight.shape)} does not fit {tuple(out.shape)}")
    device = device or limits_of(out.device)
    if invariant:
        config, block_m = invariant_config(device)
    chosen = config or choose(rows, outputs, inputs, kind, swiglu, device)
    if kind == "fp8" and chosen.variant == "dot" and chosen.block_k % GROUP:
        raise ValueError(f"skinny_linear: fp8 needs a block_k that {GROUP} divides, got {chosen.block_k}")
    if chosen.variant == "tma" and kind == "int4":
        raise ValueError("skinny_linear: int4 has no tma variant")
    whole = chosen.variant == "vector" and kind == "int4"
    made = None
    if ahead is not None:
        parts = triton.cdiv(outputs, chosen.block_n) * (chosen.block_n // INT4_VECTOR_TILE if whole else 1)
        made = Scaled(
            torch.empty(rows, outputs, dtype=out.dtype, device=out.device),
            torch.empty(parts, rows, dtype=torch.float32, device=out.device),
            ahead.eps,
        )
    if rows == 0:
        return made
    gain = None if norm is None else norm.weight
    form: Rows = "as they are" if gain is None else "weighted"
    if chosen.variant == "tma" and kind == "fp8":
        form = "float8"
    early = starts_early(rows, swiglu=swiglu, adds=residual is not None, adapters=lora is not None)
    if lora is None and chosen.early is not None:
        early = chosen.early
    prepared = prepare(source, gain, rows=form, lora=lora, device=device, pdl=pdl, hold=lora is not None and not early)
    adapters = shape = None
    if lora is not None:
        adapters = Adapters(prepared.hidden, lora.b, lora.row_adapters, lora.active, lora.ranks)
        shape = shape_of(adapters, lora, chosen.slots)
    squares = prepared.squares if scaled is None else scaled.squares
    around = Around(
        squares,
        scaled.eps if scaled is not None else 0.0 if norm is None else norm.eps,
        residual,
        0 if residual is None else residual.stride(0),
        out,
        out.stride(0),
        None if ahead is None else ahead.weight,
        None if made is None else made.values,
        None if made is None else made.squares,
        None if conv is None else Decodes(conv.state, conv.weight, conv.slots, conv.weight.shape[1]),
    )
    constants: dict[str, Any] = {
        "K": inputs,
        "BLOCK_N": chosen.block_n,
        "SWIGLU": swiglu,
        "LORA": shape,
        "PARTS": 0 if squares is None else squares.shape[0],
        "CONV": kernel,
        "INTERPRETED": triton.knobs.runtime.interpret,
        "PDL": pdl,
        "num_warps": chosen.warps,
        "launch_pdl": pdl and (early or adapters is not None),
    }
    _launch(prepared, weight, around, adapters, chosen, block_m, workspace, constants)
    return made


def _launch(
    prepared: Prepared,
    weight: Weight,
    around: Around,
    adapters: Adapters | None,
    config: SkinnyConfig,
    block_m: int | None,
    workspace: SplitWorkspace | None,
    shared: dict[str, Any],
) -> None:
    """The kernel of the variant.

    Args:
        shared: what every variant is told by name.
    """
    x = prepared.x
    rows, inputs = x.shape
    outputs = weight.shape[0]
    kind = weight_kind(weight)
    values, scale, zero = parts_of(weight)
    tiles = triton.cdiv(outputs, config.block_n)
    if config.variant == "vector" and isinstance(weight, Int4Weight):
        if rows > INT4_VECTOR_ROWS or config.block_n < INT4_VECTOR_TILE:
            raise ValueError(f"skinny_linear: int4 vector takes {INT4_VECTOR_ROWS} rows, a block_n of 16 at least")
        # Or two programs of so many registers would not fit a multiprocessor.
        crowded = config.warps == 8 and adapters is None and config.block_n * inputs > 64 * 256 * config.warps
        shared = shared | {"WARPS": config.warps, "maxnreg": 128 if crowded else None}
        int4_vector_kernel[(tiles,)](
            x, values, scale, zero, around, adapters, rows, x.stride(0),
            N=outputs, ROWS=triton.next_power_of_2(rows), **shared,
        )  # fmt: skip
        return
    shared = shared | {"KIND": KINDS[kind], "PREFETCH": config.prefetch}
    if config.variant == "vector":
        vector_kernel[(tiles,)](
            x, values, scale, around, adapters, outputs, x.stride(0), ROWS=rows, BLOCK_K=config.block_k, **shared
        )
        return
    if config.variant == "stream":
        words = config.block_k // _PARTS[kind]
        if words % (32 * config.warps) or config.block_n < 16:
            raise ValueError(f"skinny_linear: a stream of 16 rows and 32 words a warp at least, got {config}")
        block = block_m or max(8, min(MAX_ROWS, triton.next_power_of_2(rows)))
        stream_kernel[(tiles, triton.cdiv(rows, block))](
            x, values, scale, zero, around, adapters, rows, outputs, x.stride(0),
            BLOCK_M=block, BLOCK_K=config.block_k, WARPS=config.warps, AHEAD=config.stages, **shared,
        )  # fmt: skip
        return
    block = block_m or min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, block)
    partials = counters = None
    if config.splits > 1:
        sums = tiles * row_tiles * config.splits * config.block_n * block
        space = workspace or SplitWorkspace.allocate(x.device, sums=sums, tiles=tiles * row_tiles)
        if space.partials.numel() < sums or space.counters.numel() < tiles * row_tiles:
            raise ValueError(f"skinny_linear: the workspace must hold {sums} sums and {tiles * row_tiles} counters")
        partials, counters = space.partials, space.counters
    shared = shared | {"BLOCK_M": block, "SPLITS": config.splits, "STAGES": config.stages}
    if config.variant == "tma":
        raw = weight.values if isinstance(weight, Fp8Weight) else values
        tma_kernel[(tiles, config.splits, row_tiles)](
            tile_descriptor(x, block, config.block_k),
            prepared.scale,
            tile_descriptor(raw, config.block_n // (2 if shared["SWIGLU"] else 1), config.block_k),
            raw,
            scale,
            around,
            adapters,
            partials,
            counters,
            rows,
            outputs,
            BLOCK_K=config.block_k,
            STAGGER=config.stagger,
            **shared,
        )
        return
    dot_kernel[(tiles, config.splits, row_tiles)](
        x, values, scale, zero, around, adapters, partials, counters, rows, outputs, x.stride(0),
        BLOCK_K=GROUP if kind == "int4" else config.block_k, **shared,
    )  # fmt: skip


KINDS: dict[Kind, int] = {"none": 0, "fp8": 1, "int4": 2}
_PARTS: dict[Kind, int] = {"none": 1, "fp8": 2, "int4": 4}
"""Numbers of a weight's word."""


def parts_of(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if isinstance(weight, Tensor):
        return weight, None, None
    if isinstance(weight, Fp8Weight):
        return weight.words(), weight.scale, None
    return weight.packed, weight.scale, weight.zero
