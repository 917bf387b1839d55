"""Configurations that may be faster than the one that a product or attention has: its neighbours, the most promising
first, and the other variants where it begins. All fit the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kernels.gpu.attention.decode import DecodeConfig, decode_splits
from kernels.gpu.configs import Product
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.skinny import MAX_ROWS
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig
from kernels.gpu.linear.skinny_int4 import MAX_ROWS as INT4_VECTOR_ROWS

_BYTES: dict[Kind, float] = {"none": 2, "fp8": 1, "int4": 0.5}
_ACTIVATION_BYTES: dict[Kind, int] = {"none": 2, "fp8": 1, "int4": 2}
"""In the tma variant: float8 weights multiply float8 rows."""
_GROUP = 128
"""Inputs that quantized weights are loaded by."""
_BOX = 256
"""Most rows and columns of a tile that the copy engine (TMA) moves: CUDA driver API, cuTensorMapEncodeTiled."""
_RESERVE = 2048
"""Bytes of shared memory beside the tiles."""
_LEAST_SHARE = 16
"""Rows of x that a tile of tensor cores has at least."""


def nbytes(product: Product) -> float:
    """Bytes of the product's weight."""
    return product.outputs * product.inputs * _BYTES[product.kind]


def neighbours(now: SkinnyConfig, rows: int, product: Product, device: DeviceLimits) -> Iterator[SkinnyConfig]:
    """Configurations one change away."""
    made: dict[SkinnyConfig, None] = {}
    for change in _CHANGES[now.variant](now):
        if change != now and fits(change, rows, product, device):
            made[change] = None
    yield from made


def others(
    now: SkinnyConfig | None, rows: int, product: Product, device: DeviceLimits
) -> Iterator[SkinnyConfig | None]:
    """Configurations of other variants, of which one may be a better start."""
    variant = None if now is None else now.variant
    found = [each for each in _starts(rows, product, device) if each.variant != variant]
    yield from (each for each in found if fits(each, rows, product, device))
    if now is not None and rows > 1:
        yield None


def attention(now: DecodeConfig, rows: int, kv_heads: int, device: DeviceLimits) -> Iterator[DecodeConfig]:
    """Cuts of decode attention that differ in one thing."""
    programs = rows * kv_heads
    launched = decode_splits(rows, kv_heads, device)
    splits = {max(1, round(device.wave(132 * times) / programs)) for times in (1, 2, 3, 4)}
    splits |= {2 * now.splits, max(1, now.splits // 2)}
    found = [replace(now, splits=count) for count in sorted(splits, key=lambda count: abs(count - now.splits))]
    found += [replace(now, min_keys=keys) for keys in (64, 128, 256)]
    found += [replace(now, stages=stages) for stages in (now.stages + 1, now.stages - 1)]
    found += [replace(now, block_keys=keys) for keys in (now.block_keys * 2, now.block_keys // 2)]
    for each in found:
        if each != now and each.splits <= launched and each.stages >= 1 and 16 <= each.block_keys <= 128:
            yield each


def fits(config: SkinnyConfig, rows: int, product: Product, device: DeviceLimits) -> bool:
    """True if the kernels have such a configuration and the device, as far as can be told without compiling it, the
    shared memory."""
    if config.block_k > 4096 or not 1 <= config.warps <= 16 or config.block_k > product.inputs:
        return False
    if product.kind != "none" and config.block_k % _GROUP:
        return False
    if config.variant == "vector":
        few = rows <= INT4_VECTOR_ROWS if product.kind == "int4" else rows == 1
        return few and (config.block_n >= 16 or product.kind != "int4")
    if config.variant == "stream":
        return rows <= 16 and config.block_k / _PARTS[product.kind] % (32 * config.warps) == 0
    size: float = _BYTES[product.kind]
    if config.variant == "tma":
        if product.kind == "int4" or device.size != "wide" or not device.programmatic_launch:
            return False
        if config.block_n < 64 or config.block_k > _BOX:
            return False
        beside: float = _ACTIVATION_BYTES[product.kind]
    else:
        beside = 2
        if config.block_n < 32:
            return False
    tiles = config.block_n * size + max(_LEAST_SHARE, min(MAX_ROWS, rows)) * beside
    shares = -(-product.inputs // config.block_k)
    enough = config.splits <= min(16, shares) and config.block_n <= 256
    return enough and config.stages * config.block_k * tiles + _RESERVE <= device.shared_memory


_PARTS: dict[Kind, int] = {"none": 1, "fp8": 2, "int4": 4}


def _vector(now: SkinnyConfig) -> Iterator[SkinnyConfig]:
    n, k, warps = now.block_n, now.block_k, now.warps
    shapes = (
        (n, k * 2, warps * 2), (n * 2, k, warps), (n // 2, k, warps), (n, k * 2, warps), (n, k, warps * 2),
        (n, k // 2, warps), (n * 2, k, warps * 2), (n, k // 2, max(1, warps // 2)), (n, k, warps // 2),
        (n // 2, k * 2, warps), (n * 2, k // 2, warps),
    )  # fmt: skip
    yield from _early(now)
    yield from (replace(now, block_n=a, block_k=b, warps=c) for a, b, c in shapes if min(a, b, c) >= 1)
    yield from (replace(now, prefetch=tiles) for tiles in (0, 1, 2))


def _stream(now: SkinnyConfig) -> Iterator[SkinnyConfig]:
    k, warps, stages = now.block_k, now.warps, now.stages
    shapes = (
        (k, warps, stages + 1), (k, warps, stages - 1), (k * 2, warps, 2), (k * 2, warps * 2, stages),
        (k // 2, warps, stages + 1), (k // 2, max(1, warps // 2), stages), (k * 2, warps * 2, 2),
    )  # fmt: skip
    yield from _early(now)
    yield from (replace(now, block_k=a, warps=b, stages=c) for a, b, c in shapes if min(a, b, c) >= 1)


def _tiles(now: SkinnyConfig) -> Iterator[SkinnyConfig]:
    n, k, stages, splits = now.block_n, now.block_k, now.stages, now.splits
    shapes = (
        (n, k, stages - 1, splits), (n, k, stages + 1, splits), (n, k * 2, stages // 2, splits),
        (n, k // 2, stages * 2, splits), (n, k, stages, splits * 2), (n, k, stages, splits + 1),
        (n, k, stages, splits - 1), (n, k, stages - 2, splits), (n, k, stages + 2, splits),
        (n * 2, k, stages - 1, splits * 2), (n * 2, k // 2, stages, splits * 2), (n * 2, k // 2, stages, splits),
        (n // 2, k, stages, splits), (n // 2, k * 2, stages, splits), (n * 2, k, max(2, stages // 2), splits),
    )  # fmt: skip
    warps = now.warps
    yield from _early(now)
    for a, b, c, d in shapes:
        if min(b, c, d) >= 1 and a >= 16:
            yield replace(now, block_n=a, block_k=b, stages=c, splits=d, warps=8 if a == 256 else warps)
    if now.variant == "tma":
        yield replace(now, stagger=not now.stagger)
    yield from (replace(now, prefetch=size) for size in (512, 1024, 0, 2048))


def _early(now: SkinnyConfig) -> Iterator[SkinnyConfig]:
    """Nothing is compiled for these."""
    yield from (replace(now, early=early) for early in (True, False))


_CHANGES: dict[str, Callable[[SkinnyConfig], Iterator[SkinnyConfig]]] = {
    "vector": _vector,
    "stream": _stream,
    "tma": _tiles,
    "dot": _tiles,
}


def _starts(rows: int, product: Product, device: DeviceLimits) -> Iterator[SkinnyConfig]:
    fp8 = product.kind == "fp8"
    if rows == 1:
        for n, k, warps in ((4, 1024, 4), (4, 1024, 2), (2, 2048, 4), (8, 512, 2)):
            yield SkinnyConfig("vector", n, k, warps)
    if rows <= 16:
        yield SkinnyConfig("stream", 16, 512, 4, 3)
        yield SkinnyConfig("stream", 16, 1024, 8, 2)
    if rows > 1:
        for n, k, stages in ((64, 256, 3), (128, 128, 4)) if fp8 else ((64, 128, 4), (128, 64, 5)):
            splits = max(1, min(8, device.wave(128) // -(-product.outputs // n)))
            yield SkinnyConfig("tma", n, k, 4, stages, splits)
        stages = 4 if device.size == "wide" else 2
        yield SkinnyConfig("dot", 64, 128, 4, stages, max(1, min(8, device.wave(128) * 64 // product.outputs)))
