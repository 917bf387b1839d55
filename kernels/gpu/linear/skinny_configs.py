"""Variants of `skinny_linear` by shape and device: a table from measurements on an H200
(benchmarks/tuning/linear/sweep.py), and rules for what is not in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from kernels.gpu.launch.device import DeviceLimits, Size

Kind = Literal["none", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Tile sizes of a product.

    Raises:
        ValueError: sizes that the kernels do not have.
    """

    variant: Literal["vector", "stream", "dot", "tma"]
    """Products in registers, all of K in one program (int4: up to 8 rows of x, on tensor cores as well, what a
    weight's group has in common put on its sums); tensor cores fed from registers, likewise, warps sharing K; tensor
    cores fed from shared memory, through registers; or that without (in float8 a kernel before it quantizes x)."""
    block_n: int
    """Rows of the weight a program reads."""
    block_k: int
    """Inputs of a load. fp8: a multiple of 128; int4: one group of 128, whatever this says, and one a warp (vector)."""
    warps: int
    stages: int = 1
    """Loads in flight (not vector)."""
    splits: int = 1
    """Programs that share K (dot, tma)."""
    prefetch: int = 0
    """Prefetch into L2 before the kernel ahead has ended. dot, tma: that many bytes of each row; the others: all of
    the tile that many tiles further on (not int4)."""
    stagger: bool = False
    """True if programs begin at different columns (tma)."""
    slots: int = 8
    """Adapters that expansion takes side by side, their B held in registers meanwhile (not vector)."""
    early: bool | None = None
    """True if a product without adapters is launched before the kernel ahead of it has ended; None: as starts_early()
    says."""

    def __post_init__(self) -> None:
        sizes = (self.block_n, self.block_k, self.warps, self.prefetch or 1, self.slots)
        if any(size & (size - 1) or size < 1 for size in sizes) or self.stages < 1 or self.splits < 1:
            raise ValueError(f"sizes, warps, prefetch, slots are powers of two, stages and splits at least 1: {self}")
        if self.variant not in ("dot", "tma") and self.splits > 1:
            raise ValueError("only the dot and tma variants split K between programs")


@cache
def choose(rows: int, outputs: int, inputs: int, kind: Kind, swiglu: bool, device: DeviceLimits) -> SkinnyConfig:
    """The variant for x [rows, inputs] and a weight [outputs, inputs]: what was measured, else by rule."""
    measured = (config for most, config in _measured(outputs, inputs, kind, device) if rows <= most)
    config = next(measured, None) or _by_rule(rows, outputs, inputs, kind, swiglu, device)
    most_slots = _most_slots(config, rows, kind, device)
    return config if config.slots <= most_slots else replace(config, slots=most_slots)


def _most_slots(config: SkinnyConfig, rows: int, kind: Kind, device: DeviceLimits) -> int:
    """Adapters that expansion may take side by side: fewer than was measured where a thread would spill 40 bytes and
    more with as many (tests/kernels/compile_table)."""
    match device.capability, config.variant, kind:
        case (8, 0), "vector", "int4":
            return 2 if rows <= 4 else 4
        case (9, _), "vector", "int4" if rows > 4:
            return 4
        case (9, _), "stream", "int4" if config.warps == 4:
            return 4
        case (10, _), "tma", "none" if rows < 8:
            return 2
        case (12, _), "stream", "none":
            return 1
        case (10, _), "vector" | "stream", "int4":
            return 4
        case (12, _), "stream", "int4" if config.warps == 8:
            return 4
        case _:
            return config.slots


def _measured(outputs: int, inputs: int, kind: Kind, device: DeviceLimits) -> _Measured:
    """Measured variants of a shape: they need Hopper's copies of tiles and its shared memory."""
    return _MEASURED.get((kind, outputs, inputs), ()) if _copies_tiles(device) else ()


def _copies_tiles(device: DeviceLimits) -> bool:
    """True if the tma variant is there, and shared memory for its loads in flight."""
    return device.size == "wide" and device.programmatic_launch


def _by_rule(rows: int, outputs: int, inputs: int, kind: Kind, swiglu: bool, device: DeviceLimits) -> SkinnyConfig:
    if rows <= 8 and kind == "int4" and (rows <= 4 or inputs < 8192):
        return _few_int4(rows, outputs, inputs, swiglu, device)
    if rows == 1:
        return _vector(outputs, inputs, kind, swiglu)
    if kind == "none" and device.capability[0] == 9 and outputs * inputs >= _SMALL:
        if rows <= 16 and outputs <= _FEW_OUTPUTS:
            return _STREAM_DEEP
        if rows > 4 and inputs <= _FEW_INPUTS:
            return _DOT_SHORT
    if (tiles := _by_tiles(rows, outputs, inputs, kind, swiglu, device)) is not None:
        return tiles
    if rows <= 16 and inputs >= 8192 and kind == "int4":
        # With 4 warps the loads and products of so many inputs, all in a row, take 18 s to compile; with 4 stages a
        # thread spills 48 bytes on Hopper.
        return SkinnyConfig("stream", 16, 1024, warps=8, stages=3 if device.capability[0] == 9 else 4)
    if rows <= 16 and inputs % 512 == 0:
        chosen = (_STREAM_HOPPER if device.capability[0] == 9 else _STREAM)[kind]
        # With 4 warps a thread would spill up to 64 bytes for so many rows.
        return replace(chosen, warps=8) if kind == "none" and rows > 8 else chosen
    block_n = 128 if swiglu or outputs >= 32768 else 64
    splits = 1
    while splits < 8 and outputs // block_n * splits < device.wave(120):
        splits *= 2
    stages = _DOT_STAGES[device.size]
    warps = block_n // 16 if device.size == "wide" else 8  # with 4 fp8 spills registers before Hopper
    return SkinnyConfig("dot", block_n, 128, warps, stages=stages, splits=splits, prefetch=512)


def _vector(outputs: int, inputs: int, kind: Kind, swiglu: bool) -> SkinnyConfig:
    """One row, as found inside steps of the 4B, the 0.8B and (float8) the 35B-A3B shape: a program of one warp for rows
    of up to 2 KiB, whose products end too soon to be added up over warps; of four, and fewer rows a program, for long
    ones."""
    a_byte = 1 if kind == "fp8" else 2
    if inputs * a_byte <= 2048:
        return SkinnyConfig("vector", 8 if swiglu and kind == "none" else 4, 1024 // a_byte, warps=1)
    if inputs < _LONG:
        return SkinnyConfig("vector", 4, 1024 // a_byte, warps=2)
    few = inputs > 4096 or outputs <= _FEW_OUTPUTS
    return SkinnyConfig("vector", 2 if few else 4, 2048 // a_byte, warps=4)


_LONG = 3584
"""Inputs from which on a row of the weight is long."""
_FEW_OUTPUTS = 1024
"""Outputs that are too few for a program of several on each multiprocessor."""
_FEW_INPUTS = 1024
"""Inputs whose tiles have come before the copy engine's descriptors pay."""
_STREAM_DEEP = SkinnyConfig("stream", 16, 1024, warps=8, stages=2)
"""Few outputs: of 8 rows of the 0.8B shape 12 and 26 µs a step of 1,090 less than with the tma variant."""
_DOT_SHORT = SkinnyConfig("dot", 64, 128, warps=4, stages=4, prefetch=512)
"""Few inputs: of 8 rows of the 0.8B shape 9 and 12 µs less, of 64 rows 34 and 32 µs of 2,240."""
_STREAM_HOPPER: dict[Kind, SkinnyConfig] = {
    "none": SkinnyConfig("stream", 16, 512, warps=4, stages=2),
    "fp8": SkinnyConfig("stream", 16, 512, warps=4, stages=3),
    "int4": SkinnyConfig("stream", 16, 512, warps=4, stages=4),
}
"""Up to 16 rows, as measured on an H200."""
_STREAM: dict[Kind, SkinnyConfig] = {
    "none": SkinnyConfig("stream", 16, 512, warps=8, slots=2),
    "fp8": SkinnyConfig("stream", 16, 512, warps=4, stages=2, slots=4),
    "int4": SkinnyConfig("stream", 16, 512, warps=4, stages=4),
}
"""The same on others, where a thread would spill up to 144 bytes with those (tests/kernels/compile_table)."""
_SMALL = 1 << 20
"""Numbers of a matrix whose product takes no longer than its launch, however it is cut up."""


def _by_tiles(
    rows: int, outputs: int, inputs: int, kind: Kind, swiglu: bool, device: DeviceLimits
) -> SkinnyConfig | None:
    """The tma variant as it was the fastest for the 4B shape's matrices, for others: as wide a tile as leaves one for
    every multiprocessor, else parts of K. None: the device or the shape has none."""
    many, wide = outputs >= 128 * device.multiprocessors, outputs >= 64 * device.multiprocessors
    block_k = (64 if many else 128) * (2 if kind == "fp8" else 1)
    small = outputs * inputs < _SMALL
    if small or kind == "int4" or inputs % block_k or not _copies_tiles(device):
        return None
    if many:
        return _tma(128, block_k, 5 if rows <= 32 else 4)
    # Half a tile of gate rows is less than wgmma takes: operands go through registers, and adapters of 64 rows spill.
    slots = 2 if swiglu and kind == "fp8" and rows > 32 else 8
    if wide:
        return _tma(64, block_k, 4, slots=slots)
    splits = min(round(device.multiprocessors * 64 / outputs), inputs // (4 * block_k))
    return _tma(64, block_k, 4, max(1, splits), slots=slots)


_DOT_STAGES: dict[Size, int] = {"small": 2, "large": 3, "wide": 4}
"""Loads in flight of 128 rows of the weight and 64 of x, as many as shared memory holds."""


def _few_int4(rows: int, outputs: int, inputs: int, swiglu: bool, device: DeviceLimits) -> SkinnyConfig:
    """Found as below, for 1, 4 and 8 rows of the 4B shape."""
    if rows == 1 or inputs >= 8192:
        # Up to 9,216 inputs the registers of 4 warps hold all of a tile. 3 and 4 rows spill 8 bytes (16 with adapters),
        # and are faster than what does not by an eighth of the step.
        warps = 4 if inputs <= 9216 else 8
        return SkinnyConfig("vector", 16, 128 * warps, warps)
    if outputs < 8192:
        return SkinnyConfig("vector", 16, 1024, warps=8)
    if rows <= 4 and not swiglu:
        return SkinnyConfig("vector", 32, 512, warps=4)
    # With 2 on Blackwell a thread would spill up to 48 bytes, however many adapters it takes at a time.
    warps = 4 if device.capability[0] >= 10 else 2
    return SkinnyConfig("vector", 16, 128 * warps, warps)


@cache
def most_rows(outputs: int, inputs: int, kind: Kind, device: DeviceLimits) -> int:
    """Most rows for which `skinny_linear` beats a plain matrix product with the rest in kernels of its own: as many as
    were measured, else by rule."""
    if measured := _measured(outputs, inputs, kind, device):
        return measured[-1][0]
    by_tiles = _by_tiles(64, outputs, inputs, kind, False, device) is not None
    return 64 if by_tiles or kind != "none" else 16


def starts_early(rows: int, *, swiglu: bool, adds: bool, adapters: bool) -> bool:
    """True if a product is launched before the kernel ahead of it has ended (kernels.gpu.launch.programmatic), if
    anything is.

    With all of them early a step is slower than with none: programs settle where those of the kernel ahead leave room,
    and one product after the other inherits an uneven spread over the multiprocessors. One that waits in each layer
    evens it out: on an H200 a step of 1, 8, 64 rows takes 2,458, 2,882, 5,080 us instead of 2,617, 3,036, 5,125, and
    2,656, 3,019, 5,248 with all waiting. With adapters each product follows a small kernel: at 8 and 16 rows that has
    this effect (one row: 2,873 instead of 2,914 µs if one waits); with more it settles beside the kernel ahead, and
    holds back the products that would wait themselves.

    Args:
        adds: to the residual stream.
        adapters: a kernel for them runs ahead of the product.
    """
    if adapters and 4 < rows <= 16:
        return True
    return not swiglu if rows <= 4 else not adds


def invariant(device: DeviceLimits) -> tuple[SkinnyConfig, int]:
    """Variant, and rows of a program, for any number of rows: a row's bits then do not depend on how many there
    are."""
    stages = 2 if device.size == "small" else 3
    # With 4 warps on Blackwell's small cards, or with twice the slots, a thread would spill 40 to 64 bytes.
    warps, slots = (8, 2) if device.capability[0] == 12 else (4, _INVARIANT_SLOTS[device.size])
    return SkinnyConfig("dot", 64, 128, warps, stages, slots=slots), 64


_INVARIANT_SLOTS: dict[Size, int] = {"small": 1, "large": 2, "wide": 4}
"""Adapters side by side, where 4 warps share a tile."""


_Measured = tuple[tuple[int, SkinnyConfig], ...]
"""Ascending: most rows, and the variant up to there. More than the last go to the plain product."""


def _tma(block_n: int, block_k: int, stages: int, splits: int = 1, prefetch: int = 0, slots: int = 8) -> SkinnyConfig:
    return SkinnyConfig("tma", block_n, block_k, 4, stages, splits, prefetch, slots=slots)


_IN_PROJ: _Measured = (
    (1, SkinnyConfig("vector", 4, 512, 2)),
    (4, _tma(64, 128, 3)),
    (32, _tma(64, 128, 4)),
    (64, _tma(128, 128, 4)),
)
_FP8_IN_PROJ: _Measured = (
    (1, SkinnyConfig("vector", 4, 1024, 2)),
    (16, _tma(64, 256, 4)),
    (64, _tma(64, 256, 3)),
)
_FEW_IN_FP8 = SkinnyConfig("stream", 16, 512, 4, 3)

# Found on an H200 inside a decode step (benchmarks.tuning.step.tune), one thing changed at a time.
_MEASURED: dict[tuple[Kind, int, int], _Measured] = {
    ("none", 18432, 2560): (
        (1, SkinnyConfig("vector", 4, 512, 2)),
        (32, _tma(128, 64, 5)),
        (64, _tma(128, 64, 4)),
    ),
    ("none", 2560, 9216): (
        (1, SkinnyConfig("vector", 2, 1024, 4)),
        (32, _tma(64, 128, 7, 3)),
        (64, _tma(64, 128, 6, 3)),  # leaves room for the small kernel of the next product's adapters
    ),
    ("none", 12352, 2560): _IN_PROJ,
    ("none", 10240, 2560): _IN_PROJ,
    ("none", 2560, 4096): (
        (1, SkinnyConfig("vector", 4, 1024, 4)),
        (8, _tma(64, 128, 8, 3)),
        (64, _tma(64, 128, 4, 3)),
    ),
    ("none", 248320, 2560): (
        (1, SkinnyConfig("vector", 8, 512, 2)),
        (16, _tma(128, 128, 3)),
        (32, _tma(128, 64, 4)),
        (64, _tma(128, 64, 3)),
    ),
    ("fp8", 18432, 2560): (
        (1, SkinnyConfig("vector", 4, 1024, 2)),
        (16, _FEW_IN_FP8),
        (64, _tma(128, 128, 4, slots=4)),
    ),
    ("fp8", 2560, 9216): ((1, SkinnyConfig("vector", 2, 2048, 4)), (16, _FEW_IN_FP8), (64, _tma(64, 128, 8, 3))),
    ("fp8", 12352, 2560): _FP8_IN_PROJ,
    ("fp8", 10240, 2560): _FP8_IN_PROJ,
    ("fp8", 248320, 2560): (
        (1, SkinnyConfig("vector", 4, 512, 2)),
        (16, _FEW_IN_FP8),
        (64, _tma(128, 128, 4)),
    ),
    ("fp8", 2560, 4096): (
        (1, SkinnyConfig("vector", 2, 2048, 4)),
        (8, SkinnyConfig("stream", 16, 1024, 8, 2)),
        (16, SkinnyConfig("stream", 16, 512, 4, 3, slots=4)),  # of 1024 inputs a thread would spill up to 144 bytes
        (64, _tma(64, 256, 3, 4)),
    ),
}
"""Measured variants by kind, outputs and inputs."""
