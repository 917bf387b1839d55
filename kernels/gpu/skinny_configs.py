"""Which variant of `skinny_linear` runs for which shape: one explicit table, filled from measurements on an H200
(benchmarks/sweep_linear.py), no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "fp8", "int4"]


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How a product is cut up.

    Raises:
        ValueError: sizes that the kernels do not have.
    """

    variant: Literal["vector", "stream", "dot", "tma"]
    """Products in registers, all of K in one program (int4: of whole numbers, up to 4 rows of x); tensor
    cores fed from registers, likewise, warps sharing K; tensor cores fed from shared memory, through registers; or that
    without (in float8 a kernel before it quantizes x)."""
    block_n: int
    """Rows of the weight a program reads."""
    block_k: int
    """Inputs of a load. fp8: a multiple of 128; int4: one group of 128, whatever this says."""
    warps: int
    stages: int = 1
    """Loads in flight (not vector)."""
    splits: int = 1
    """Programs that share K (dot, tma)."""
    prefetch: int = 0
    """What is asked of L2 before the kernel ahead has ended. dot, tma: that many bytes of each row; the others: all of
    the tile that many tiles further on (not int4)."""

    stagger: bool = False
    """Whether programs begin at different columns (tma)."""
    slots: int = 8
    """Adapters that expansion takes side by side, their B held in registers meanwhile (not vector)."""

    def __post_init__(self) -> None:
        sizes = (self.block_n, self.block_k, self.warps, self.prefetch or 1, self.slots)
        if any(size & (size - 1) or size < 1 for size in sizes) or self.stages < 1 or self.splits < 1:
            raise ValueError(f"sizes, warps, prefetch, slots are powers of two, stages and splits at least 1: {self}")
        if self.variant not in ("dot", "tma") and self.splits > 1:
            raise ValueError("only the dot and tma variants split K between programs")


def choose(rows: int, outputs: int, inputs: int, kind: Kind, swiglu: bool) -> SkinnyConfig:
    """The variant for x [rows, inputs] and a weight [outputs, inputs]: what was measured, else by rule."""
    for most, config in _MEASURED.get((kind, outputs, inputs), ()):
        if rows <= most:
            return config
    return _by_rule(rows, outputs, inputs, kind, swiglu)


def _by_rule(rows: int, outputs: int, inputs: int, kind: Kind, swiglu: bool) -> SkinnyConfig:
    if rows == 1 and kind != "int4":
        block_k = 1024 if inputs >= 4096 else 512
        return SkinnyConfig("vector", 4 if inputs <= 4096 else 2, block_k, warps=4 if inputs >= 4096 else 2)
    if rows <= 16 and inputs % 512 == 0:
        return SkinnyConfig("stream", 16, 512, warps=4, stages={"none": 2, "fp8": 3, "int4": 4}[kind])
    block_n = 128 if swiglu or outputs >= 32768 else 64
    splits = 1
    while splits < 8 and outputs // block_n * splits < 120:
        splits *= 2
    return SkinnyConfig("dot", block_n, 128, warps=block_n // 16, stages=4, splits=splits, prefetch=512)


def most_rows(outputs: int, inputs: int, kind: Kind) -> int:
    """Up to how many rows `skinny_linear` beats a plain matrix product with the rest in kernels of its own: as many as
    were measured, else by rule."""
    measured = _MEASURED.get((kind, outputs, inputs))
    if measured is not None:
        return measured[-1][0]
    return 16 if kind == "none" else 64


def invariant() -> tuple[SkinnyConfig, int]:
    """One variant, and rows of a program, for any number of rows: a row's bits then do not depend on how many there
    are."""
    return SkinnyConfig("dot", 64, 128, warps=4, stages=3, slots=4), 64


_Measured = tuple[tuple[int, SkinnyConfig], ...]
"""Ascending: most rows, and the variant up to there. More than the last go to the plain product."""


def _tma(block_n: int, block_k: int, stages: int, splits: int = 1, prefetch: int = 0, slots: int = 8) -> SkinnyConfig:
    return SkinnyConfig("tma", block_n, block_k, 4, stages, splits, prefetch, slots=slots)


_FEW_IN_FP8 = SkinnyConfig("stream", 16, 512, 4, 3)

# Microseconds on an H200 (1.98 GHz) in a graph of such products with norm, activation and residual, at the most rows of
# each entry; in brackets that of torch.mm with kernels of their own for the rest. Timed while results without
# activation went out 2 bytes at a time (not vector's), which grew by 0.17 to 0.3 us a row. That is put right but not
# timed again: the entries marked * rest on the expectation that without this growth they beat torch.mm.
_MEASURED: dict[tuple[Kind, int, int], _Measured] = {
    # 22.7; 28.5 at 64 rows (29.5 to 30.4)
    ("none", 18432, 2560): ((1, SkinnyConfig("vector", 4, 512, 2)), (64, _tma(128, 64, 4))),
    # 12.5; 15.8; 23.8* (19.3 to 20.0)
    ("none", 2560, 9216): (
        (1, SkinnyConfig("vector", 2, 1024, 4)),
        (16, _tma(64, 128, 8, 3)),
        (64, _tma(64, 128, 7, 3)),
    ),
    # 16.0; 20.0; 34.2* (21.9 to 22.6)
    ("none", 12352, 2560): (
        (1, SkinnyConfig("vector", 4, 512, 2)),
        (16, _tma(128, 128, 6, 1, 1024)),
        (64, _tma(128, 128, 4)),
    ),
    ("none", 10240, 2560): (
        (1, SkinnyConfig("vector", 4, 512, 2)),
        (16, _tma(128, 128, 6, 1, 1024)),
        (64, _tma(128, 128, 4)),
    ),
    # 6.5; 9.7; 24.6* (11.8 to 11.0)
    ("none", 2560, 4096): (
        (1, SkinnyConfig("vector", 2, 512, 2)),
        (16, _tma(64, 128, 8, 3)),
        (64, _tma(64, 128, 3, 4)),
    ),
    # 279; 305 (317)
    ("none", 248320, 2560): ((1, SkinnyConfig("vector", 8, 512, 2)), (16, _tma(128, 128, 3))),
    # 15.3; 21.2 at 8 rows; 18.5
    ("fp8", 18432, 2560): (
        (1, SkinnyConfig("vector", 4, 1024, 2)),
        (16, _FEW_IN_FP8),
        (64, _tma(128, 128, 4, slots=4)),
    ),
    # 8.2; 13.0 at 8 rows; 20.5
    ("fp8", 2560, 9216): ((1, SkinnyConfig("vector", 2, 2048, 4)), (16, _FEW_IN_FP8), (64, _tma(64, 128, 8, 3))),
    # 10.9; 15.7 at 8 rows; 27.8*
    ("fp8", 12352, 2560): ((1, SkinnyConfig("vector", 4, 1024, 2)), (16, _FEW_IN_FP8), (64, _tma(64, 256, 3))),
    ("fp8", 10240, 2560): ((1, SkinnyConfig("vector", 4, 1024, 2)), (16, _FEW_IN_FP8), (64, _tma(64, 256, 3))),
    # 4.4; 6.9 at 8 rows; 22.3*
    ("fp8", 2560, 4096): ((1, SkinnyConfig("vector", 2, 2048, 4)), (16, _FEW_IN_FP8), (64, _tma(64, 256, 3, 4))),
}
"""By kind, outputs and inputs."""
