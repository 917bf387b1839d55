"""Cases of benchmarks.kernels.all: products with few rows and many, weight formats, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kernels.timing import Case, Tensors, Work
from kernels.gpu.lora.rows import LoraRows, active_slots
from kernels.quantize import (
    GROUP,
    Fp8Weight,
    Int4Weight,
    dequantize_fp8,
    dequantize_int4,
    quantize_fp8,
    quantize_int4,
)

EPS = 1e-6
MATRICES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "in_delta": (12352, 2560, (8192, 12288, 12320, 12352)),
    "in_attention": (10240, 2560, (8192, 9216, 10240)),
    "out": (2560, 4096, (2560,)),
    "gate_up": (18432, 2560, (9216, 18432)),
    "down": (2560, 9216, (2560,)),
    "head": (248320, 2560, (248320,)),
}
"""[N, K] of the fused projections of Qwen3.5-4B, and where the adapters' targets end."""
_NORMED = ("in_delta", "in_attention", "gate_up", "head")
_ADAPTERS, _RANK = 8, 16

Weight = Tensor | Fp8Weight | Int4Weight


def _weight(t: Tensors, n: int, k: int, kind: str) -> Weight:
    if t.device.type == "cuda":
        dense = t.normal(n, k, scale=k**-0.5)
        return dense if kind == "none" else quantize_fp8(dense) if kind == "fp8" else quantize_int4(dense)
    if kind == "none":
        return t.empty(n, k)
    if kind == "fp8":
        return Fp8Weight(t.empty(n, k, dtype=torch.float8_e4m3fn), t.empty(n, dtype=torch.float32))
    groups = k // GROUP
    packed = t.empty(groups, n, 32, dtype=torch.int16)
    return Int4Weight(packed, t.empty(groups, n), t.empty(groups, n, dtype=torch.uint8))


def _dense(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight, torch.float32).double()
    return dequantize_int4(weight, torch.float32).double()


def weight_bytes(n: int, k: int, kind: str) -> int:
    """Bytes of a weight matrix."""
    if kind == "none":
        return 2 * n * k
    return n * k + 4 * n if kind == "fp8" else n * k // 2 + 3 * n * (k // GROUP)


def make_lora(t: Tensors, name: str, rows: int) -> LoraRows:
    """8 adapters of rank 16 on all targets of a projection; row i uses adapter i mod 8."""
    _, k, ends = MATRICES[name]
    slots = [1 + row % _ADAPTERS for row in range(rows)]
    return LoraRows(
        t.normal(_ADAPTERS + 1, len(ends), _RANK, k, scale=k**-0.5),
        t.normal(_ADAPTERS + 1, _RANK, ends[-1], scale=_RANK**-0.5),
        ends,
        t.ints([0] + [_RANK] * _ADAPTERS),
        t.ints(slots),
        t.ints(active_slots(slots, min(rows, _ADAPTERS))),
    )


def _added(x: Tensor, lora: LoraRows) -> Tensor:
    parts, begin, slot = [], 0, lora.row_adapters.long()
    for target, end in enumerate(lora.ends):
        h = torch.einsum("tk,trk->tr", x, lora.a[slot, target].double())
        parts.append(torch.einsum("tr,trn->tn", h, lora.b[slot][:, :, begin:end].double()))
        begin = end
    return torch.cat(parts, 1)


def _exact_product(
    name: str, x: Tensor, weight: Weight, norm: Tensor, residual: Tensor, lora: LoraRows | None
) -> Tensor:
    """The epilogues of skinny_linear, in float64."""
    y = x.double()
    if name in _NORMED:
        y = y * norm.double() / (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    out = y @ _dense(weight).t()
    if lora is not None:
        out = out + _added(y, lora)
    if name == "gate_up":
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out + residual.double() if name in ("down", "out") else out


def skinny(name: str, rows: int, kind: str, lora: bool) -> Case:
    """One product with all that surrounds it in a layer."""
    n, k, _ = MATRICES[name]

    def make(t: Tensors) -> Work:
        from kernels.gpu.linear.skinny import Scaled, SplitWorkspace, skinny_linear

        x, norm = t.normal(rows, k), 1 + t.normal(k, scale=0.1, dtype=torch.float32)
        # As the product before leaves it.
        squares = (x.float().square().sum(1) / 40).expand(40, rows).contiguous()
        scaled = Scaled((x.float() * norm).to(x.dtype), squares, EPS)
        residual = t.normal(rows, n)
        adapters = make_lora(t, name, rows) if lora else None
        weights = [_weight(t, n, k, kind) for _ in range(t.copies(weight_bytes(n, k, kind)))]
        workspace = SplitWorkspace.allocate(t.device)
        out = t.empty(rows, n // 2 if name == "gate_up" else n)

        def run(weight: Weight) -> Tensor:
            return skinny_linear(
                scaled if name in _NORMED else x,
                weight,
                residual=residual if name in ("down", "out") else None,
                swiglu=name == "gate_up",
                lora=adapters,
                out=out,
                workspace=workspace,
            )

        used = min(rows, _ADAPTERS) * _RANK * 2 * (k * len(MATRICES[name][2]) + n) if lora else 0
        rivals: dict[str, Callable[[], object]] = {}
        if kind == "none" and not lora and isinstance(weights[0], Tensor):
            dense = [weight for weight in weights if isinstance(weight, Tensor)]
            turn = iter(range(1 << 30))
            rivals["torch F.linear alone"] = lambda: F.linear(x, dense[next(turn) % len(dense)])
        return Work(
            [partial(run, weight) for weight in weights],
            weight_bytes(n, k, kind) + used + 2 * rows * (k + out.shape[1]),
            2 * rows * n * k,
            lambda result: (result, _exact_product(name, x, weights[0], norm, residual, adapters)),
            rivals,
        )

    return Case("skinny_linear", f"{name} rows={rows} {kind}{' 8 adapters' if lora else ''}", make)


def shrinking(name: str, rows: int) -> Case:
    """A x of 8 adapters."""
    n, k, ends = MATRICES[name]
    del n

    def make(t: Tensors) -> Work:
        from kernels.gpu.linear.preparation import shrink

        size = 2 * (_ADAPTERS + 1) * len(ends) * _RANK * k
        loras = [make_lora(t, name, rows) for _ in range(t.copies(size))]
        x = t.normal(rows, k)

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            few = slice(0, min(rows, 256))
            a = loras[0].a[loras[0].row_adapters[few].long()].double()
            return result.sum(0)[few], torch.einsum("tk,tjrk->tjr", x[few].double(), a).flatten(1)

        return Work(
            [partial(shrink, x, lora) for lora in loras],
            min(rows, _ADAPTERS) * len(ends) * _RANK * k * 2 + 2 * rows * k + 4 * rows * len(ends) * _RANK,
            2 * rows * len(ends) * _RANK * k,
            check,
        )

    return Case("lora shrink", f"{name} rows={rows} 8 adapters", make)


def expanding(name: str, rows: int) -> Case:
    """B h of 8 adapters, added to an output."""
    n, _, ends = MATRICES[name]

    def make(t: Tensors) -> Work:
        from kernels.gpu.lora.expand import expand_add

        lora = make_lora(t, name, rows)
        h = t.normal(1, rows, len(ends) * _RANK, dtype=torch.float32)
        outs = [t.zeros(rows, n) for _ in range(t.copies(2 * rows * n, most=4))]

        def run(out: Tensor) -> Tensor:
            expand_add(h, lora, out)
            return out

        return Work(
            [partial(run, out) for out in outs],
            min(rows, _ADAPTERS) * _RANK * n * 2 + 4 * rows * n + 4 * h.numel(),
            2 * rows * _RANK * n,
        )

    return Case("lora expand_add", f"{name} rows={rows} 8 adapters", make)


def expanding_before_activation(rows: int) -> Case:
    """B h of 8 adapters, added to gate and up, and the activation behind them."""
    n, _, ends = MATRICES["gate_up"]

    def make(t: Tensors) -> Work:
        from kernels.gpu.lora.expand import expand_swiglu

        lora = make_lora(t, "gate_up", rows)
        h = t.normal(1, rows, len(ends) * _RANK, dtype=torch.float32)
        products = [t.zeros(rows, n) for _ in range(t.copies(2 * rows * n, most=4))]
        return Work(
            [partial(expand_swiglu, h, lora, product) for product in products],
            min(rows, _ADAPTERS) * _RANK * n * 2 + 3 * rows * n + 4 * h.numel(),
            2 * rows * _RANK * n,
        )

    return Case("lora expand_swiglu", f"gate_up rows={rows} 8 adapters", make)


def torch_product(values: Tensor, scale: Tensor, weight: Fp8Weight) -> Tensor:
    """Product of fp8_linear(), by torch's kernel (cuBLAS)."""
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(
        values, weight.values.t(), scale[:, None], by_row, weight.scale[None, :], by_row, use_fast_accum=True
    )


def fp8_product(name: str, rows: int) -> Case:
    """quantize_rows and fp8_product, beside torch's product of that and bf16."""
    n, k, _ = MATRICES[name]

    def make(t: Tensors) -> Work:
        from kernels.gpu.linear.fp8 import fp8_linear, quantize_rows

        x, weight = t.normal(rows, k), _weight(t, n, k, "fp8")
        if not isinstance(weight, Fp8Weight):
            raise TypeError

        def run() -> Tensor:
            return fp8_linear(*quantize_rows(x), weight)

        rivals: dict[str, Callable[[], object]] = {}
        if t.device.type == "cuda":
            dense = t.normal(n, k)
            values, scale = quantize_rows(x)
            rivals["torch bf16"] = lambda: F.linear(x, dense)
            rivals["torch scaled_mm alone"] = partial(torch_product, values, scale, weight)
        few = min(rows, 64)
        return Work(
            [run],
            weight_bytes(n, k, "fp8") + 2 * rows * (k + n),
            2 * rows * n * k,
            lambda result: (result[:few], x[:few].double() @ _dense(weight).t()),
            rivals,
        )

    return Case("quantize_rows + fp8_linear", f"{name} rows={rows}", make)


def unpacking(name: str) -> Case:
    """int4 to bf16."""
    n, k, _ = MATRICES[name]

    def make(t: Tensors) -> Work:
        from kernels.gpu.linear.int4 import dequantize

        weight, out = _weight(t, n, k, "int4"), t.empty(n, k)
        if not isinstance(weight, Int4Weight):
            raise TypeError
        return Work(
            [lambda: dequantize(weight, torch.bfloat16, out=out)],
            weight_bytes(n, k, "int4") + 2 * n * k,
            0,
            lambda result: (result, _dense(weight)),
        )

    return Case("int4 dequantize", name, make)


def cases(rows: Sequence[int] = (1, 4, 8, 16, 32, 64)) -> Iterator[Case]:
    for name in MATRICES:
        for count in rows:
            for kind in ("none", "fp8") if name == "head" else ("none", "fp8", "int4"):
                yield skinny(name, count, kind, lora=False)
    for name in MATRICES:
        if name == "head":
            continue
        for count in (1, 8, 64):
            yield skinny(name, count, "none", lora=True)
            yield shrinking(name, count)
        for count in (512, 8192):
            yield shrinking(name, count)
            yield expanding(name, count)
            if name == "gate_up":
                yield expanding_before_activation(count)
        yield fp8_product(name, 8192)
        yield unpacking(name)
