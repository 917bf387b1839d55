"""Products of few rows against float64, with everything that is fused into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.delta.conv1d import conv_decode
from kernels.gpu.launch.device import named
from kernels.gpu.linear.skinny import Convolution, Norm, SplitWorkspace, Weight, skinny_add, skinny_linear
from kernels.gpu.linear.skinny_configs import SkinnyConfig, choose, most_rows
from kernels.gpu.lora.rows import LoraRows
from kernels.quantize import Fp8Weight, Int4Weight, dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from tests.kernels.gpu import interpreter  # noqa: F401

VECTOR = SkinnyConfig("vector", 16, 128, warps=4)
STREAM = SkinnyConfig("stream", 16, 256, warps=2, stages=1)
SPLIT = SkinnyConfig("dot", 32, 128, warps=4, stages=2, splits=2)
TMA = SkinnyConfig("tma", 128, 128, warps=4, stages=3, splits=2)
STAGGERED = SkinnyConfig("tma", 128, 128, warps=4, stages=3, splits=2, stagger=True)
UNEVEN = SkinnyConfig("dot", 64, 256, warps=4, stages=2, splits=3)

CUTS = [
    (config, kind)
    for config in (VECTOR, STREAM, UNEVEN, TMA, STAGGERED)
    for kind in ("none", "fp8", "int4")
    if (config, kind) != (VECTOR, "int4")  # a kernel of its own: test_skinny_int4.py
]


def exact(
    x: Tensor, weight: Weight, norm: Norm | None, residual: Tensor | None, swiglu: bool, lora: LoraRows | None = None
) -> Tensor:
    """Product in float64."""
    normed = x.double()
    if norm is not None:
        normed = normed / (normed.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    y = normed @ decoded(weight).double().t()
    if lora is not None:
        for row, slot in enumerate(lora.row_adapters.tolist()):
            rank = int(lora.ranks[slot]) if slot else 0
            for target, (begin, end) in enumerate(zip((0, *lora.ends), lora.ends, strict=False)):
                down = lora.a[slot, target, :rank].double() @ normed[row]
                y[row, begin:end] += down @ lora.b[slot, :rank, begin:end].double()
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = gate * gate.sigmoid() * up
    return y if residual is None else y + residual.double()


def decoded(weight: Weight) -> Tensor:
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight, torch.float32)
    return dequantize_int4(weight, torch.float32) if isinstance(weight, Int4Weight) else weight


def inputs(shape: tuple[int, int, int], kind: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Weight]:
    rows, outputs, width = shape
    x = torch.randn(rows, width, device=device).to(dtype)
    dense = torch.randn(outputs, width, device=device).div(width**0.5).to(dtype)
    return x, {"none": lambda w: w, "fp8": quantize_fp8, "int4": quantize_int4}[kind](dense)


def check(out: Tensor, expected: Tensor, dtype: torch.dtype, *, quantized: bool = False) -> None:
    # Inputs of the product are rounded to bfloat16 once (x times the norm's weight) and the result once more; the
    # interpreter truncates instead.
    error = (out.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
    # quantized: x too, to float8 with 3 bits of mantissa at worst.
    assert error < (5e-2 if quantized else 2e-6 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize(("config", "kind"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swiglu", [False, True])
def test_product(device: torch.device, config: SkinnyConfig, kind: str, dtype: torch.dtype, swiglu: bool) -> None:
    if config.variant == "tma" and kind == "int4":
        with pytest.raises(ValueError, match="int4"):
            skinny_linear(*inputs((1, 32, 128), kind, dtype, device), config=config)
        return
    shape = (3, 40, 384)
    torch.manual_seed(0)
    x, weight = inputs(shape, kind, dtype, device)
    norm = Norm(torch.rand(384, device=device) + 0.5, 1e-6)
    residual = torch.randn(3, 20 if swiglu else 40, device=device).to(dtype)
    expected = exact(x, weight, norm, residual, swiglu)
    out = skinny_linear(x, weight, norm=norm, residual=residual, swiglu=swiglu, config=config)
    assert out.dtype == dtype
    check(out, expected, dtype, quantized=(kind, config.variant) in (("fp8", "tma"), ("int4", "vector")))
    in_place = skinny_linear(x, weight, norm=norm, residual=residual, swiglu=swiglu, config=config, out=residual)
    assert in_place is residual
    assert torch.equal(residual, out)


@pytest.mark.parametrize("config", [VECTOR, STREAM, SPLIT, TMA])
@pytest.mark.parametrize("kind", ["none", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_begins_the_norm_of_the_next(
    device: torch.device, config: SkinnyConfig, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    rows = 1 if config is VECTOR else 5
    x, first = inputs((rows, 256, 128), kind, dtype, device)
    _, second = inputs((1, 40, 256), kind, dtype, device)
    stream = torch.randn(rows, 256, device=device).to(dtype)
    norm = Norm(torch.rand(256, device=device) + 0.5, 1e-6)
    expected = exact(x, first, None, stream, False)
    scaled = skinny_add(stream, x, first, ahead=norm, config=config)
    quantized = kind == "fp8" and config.variant == "tma"
    check(stream, expected, dtype, quantized=quantized)
    assert scaled is not None
    assert scaled.squares.shape[0] == 256 // config.block_n
    squares = stream.double().square().sum(1)
    torch.testing.assert_close(scaled.squares.sum(0).double(), squares, rtol=1e-5, atol=1e-5)
    check(scaled.values, stream.double() * norm.weight, dtype)
    out = skinny_linear(scaled, second, config=config)
    check(out, exact(stream, second, norm, None, False), dtype, quantized=quantized)
    assert skinny_add(stream, x, first, config=config) is None


@pytest.mark.parametrize("config", [VECTOR, STREAM, SPLIT, replace(TMA, block_n=64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [2, 4])
def test_a_convolution_of_the_first_columns_is_that_of_decodes(
    device: torch.device, config: SkinnyConfig, dtype: torch.dtype, kernel: int
) -> None:
    torch.manual_seed(7)
    x, weight = inputs((3, 128, 128), "none", dtype, device)
    norm = Norm(torch.rand(128, device=device) + 0.5, 1e-6)
    channels = 72
    taps = torch.randn(kernel, channels, device=device).to(dtype)
    state = torch.randn(5, kernel - 1, channels, device=device).to(dtype)
    slots = torch.tensor([3, 1, 4], dtype=torch.int32, device=device)
    plain, expected_state = skinny_linear(x, weight, norm=norm, config=config), state.clone()
    expected = conv_decode(plain, taps, expected_state, slots)
    out = skinny_linear(x, weight, norm=norm, conv=Convolution(state, taps, slots), config=config)
    assert torch.equal(out[:, :channels], expected)
    assert torch.equal(out[:, channels:], plain[:, channels:])
    assert torch.equal(state, expected_state)
    with pytest.raises(ValueError, match="does not fit"):
        skinny_linear(x, weight, swiglu=True, conv=Convolution(state, taps, slots), config=config)


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_the_table_serves_every_number_of_rows(device: torch.device, rows: int) -> None:
    x, weight = inputs((rows, 80, 256), "none", torch.float32, device)
    check(skinny_linear(x, weight), exact(x, weight, None, None, False), torch.float32)


def test_measured_shapes_say_up_to_how_many_rows_they_stream() -> None:
    limit = most_rows(18432, 2560, "none", named("sm90"))
    assert limit >= 16
    assert choose(1, 18432, 2560, "none", True, named("sm90")).variant == "vector"
    assert choose(limit, 18432, 2560, "none", True, named("sm90")).variant != "vector"
    assert tuple(most_rows(80, 256, kind, named("sm90")) for kind in ("none", "int4")) == (16, 64)


def test_rows_that_the_copy_engine_cannot_find_are_copied(device: torch.device) -> None:
    x, weight = inputs((5, 64, 256), "none", torch.bfloat16, device)
    wide = torch.zeros(5, 263, dtype=torch.bfloat16, device=device)
    wide[:, 7:] = x
    check(skinny_linear(wide[:, 7:], weight, config=TMA), exact(x, weight, None, None, False), torch.bfloat16)
    x, weight = inputs((5, 64, 252), "none", torch.bfloat16, device)
    with pytest.raises(ValueError, match="16 bytes"):
        skinny_linear(x, weight, config=TMA)


def test_more_rows_than_a_tile_and_a_shared_workspace(device: torch.device) -> None:
    x, weight = inputs((37, 64, 512), "none", torch.float32, device)
    space = SplitWorkspace.allocate(device, sums=1 << 16, tiles=64)
    first = skinny_linear(x, weight, config=SPLIT, block_m=16, workspace=space)
    again = skinny_linear(x, weight, config=SPLIT, block_m=16, workspace=space)
    check(first, exact(x, weight, None, None, False), torch.float32)
    assert torch.equal(first, again)
    assert not space.counters.any()
    with pytest.raises(ValueError, match="workspace"):
        skinny_linear(x, weight, config=SPLIT, workspace=SplitWorkspace.allocate(device, sums=1, tiles=64))


def test_a_stream_of_more_rows_than_it_takes_at_once(device: torch.device) -> None:
    x, weight = inputs((19, 48, 256), "int4", torch.float32, device)
    check(skinny_linear(x, weight, config=STREAM, block_m=8), exact(x, weight, None, None, False), torch.float32)


def test_another_dtype_out_and_strided_rows(device: torch.device) -> None:
    x, weight = inputs((4, 48, 256), "none", torch.bfloat16, device)
    wide = torch.zeros(4, 300, dtype=torch.bfloat16, device=device)
    wide[:, 8:264] = x
    out = skinny_linear(wide[:, 8:264], weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    check(out, exact(x, weight, None, None, False), torch.bfloat16)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = inputs((2, 32, 256), "none", torch.float32, device)
    with pytest.raises(ValueError, match="does not fit"):
        skinny_linear(x[:, :128], weight)
    norm = Norm(torch.ones(32, device=device), 1e-6)
    scaled = skinny_add(torch.zeros(2, 32, device=device), x, weight, ahead=norm)
    assert scaled is not None
    with pytest.raises(ValueError, match="does not fit"):
        skinny_linear(scaled, weight)
    with pytest.raises(ValueError, match="residual"):
        skinny_linear(x, weight, residual=torch.zeros(2, 31, device=device))
    with pytest.raises(ValueError, match="contiguous weight"):
        skinny_linear(x, weight.to(torch.bfloat16))
    with pytest.raises(ValueError, match="block_k"):
        skinny_linear(x, quantize_fp8(weight), config=SkinnyConfig("dot", 16, 64, warps=4))
    with pytest.raises(ValueError, match="32 words"):
        skinny_linear(x, weight, config=SkinnyConfig("stream", 16, 128, warps=8))
    with pytest.raises(ValueError, match="powers of two"):
        SkinnyConfig("dot", 24, 64, warps=4)
