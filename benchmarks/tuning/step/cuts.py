"""Cuts of the products of a decode step that benchmarks.tuning.step.tune tries."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.step.decode_step import DecodeStep
from kernels.gpu.attention.decode import MAX_SPLITS, DecodeConfig
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig

# block_n.block_k.warps
_VECTOR: dict[tuple[Kind, str], str] = {
    ("none", "gate_up"): "4.512.2 2.512.2 4.1024.4 8.512.4 4.512.4 8.512.2",
    ("none", "in_proj"): "4.512.2 2.512.2 4.1024.4 8.512.4 4.512.4 8.512.2",
    ("none", "out_proj"): "2.512.2 4.512.2 2.1024.4 4.1024.4 1.1024.2",
    ("none", "down"): "2.1024.4 1.1024.4 2.2048.8 2.1024.8 1.1024.2 4.1024.8",
    ("none", "head"): "8.512.2 4.512.2 8.512.4 16.512.4",
    ("fp8", "gate_up"): "4.1024.2 8.1024.2 8.512.2 4.512.2 8.1024.4",
    ("fp8", "in_proj"): "4.1024.2 8.1024.2 8.512.2 4.512.2",
    ("fp8", "out_proj"): "2.2048.4 4.1024.2 4.2048.4 2.1024.2",
    ("fp8", "down"): "2.2048.4 4.2048.8 2.1024.4 4.2048.4 2.2048.8",
    ("fp8", "head"): "8.512.2 8.1024.2 4.1024.2 16.512.4",
    ("int4", "gate_up"): "32.512.4 16.512.4 32.1024.8 16.1024.8 16.256.2 64.1024.8",
    ("int4", "in_proj"): "32.512.4 16.512.4 32.1024.8 16.1024.8 16.256.2 64.1024.8",
    ("int4", "out_proj"): "16.1024.8 16.512.4 16.2048.16 32.1024.8 32.2048.16",
    ("int4", "down"): "16.1024.8 16.512.4 16.2048.16 32.1024.8 32.2048.16",
}
# block_k.warps.stages
_STREAM: dict[Kind, str] = {
    "none": "512.4.3 1024.4.2 512.4.2 256.4.4 1024.8.2",
    "fp8": "512.4.3 1024.4.2 512.4.2 1024.8.2",
    "int4": "512.4.4 512.4.2 1024.8.2 1024.8.4",
}
# block_n.block_k.stages.splits, and 1 if programs begin at different columns
_TMA: dict[tuple[Kind, str], str] = {
    ("none", "gate_up"): "128.64.4.1 128.64.3.1 128.64.5.1 128.64.6.1 128.128.2.1 128.64.5.1.1 128.64.4.1.1",
    ("none", "in_proj"): "64.128.5.1 64.128.4.1 64.128.3.1 64.64.8.1 128.64.8.1 128.128.4.1 64.128.4.1.1 128.128.4.1.1",
    ("none", "out_proj"): "64.128.8.3 64.128.5.4 64.128.3.6 64.128.4.3 128.64.6.6 128.64.4.6 128.128.3.6",
    ("none", "down"): "64.128.7.3 64.128.6.3 64.64.7.3 64.128.5.6 128.64.8.6 128.64.6.6 128.128.4.6 128.128.3.6",
    ("none", "head"): "128.64.4.1 128.64.3.1 128.64.6.1 128.128.3.1 128.128.2.1 64.128.4.1 256.64.3.1",
    ("fp8", "gate_up"): "128.128.4.1 128.128.3.1 128.128.5.1 128.256.2.1 256.128.3.1",
    ("fp8", "in_proj"): "64.256.3.1 64.128.5.1 64.256.4.1 128.128.5.1 64.128.8.1",
    ("fp8", "out_proj"): "64.256.3.4 64.128.8.3 64.256.3.3 64.128.5.4",
    ("fp8", "down"): "64.128.8.3 64.256.4.3 64.256.3.6 64.256.4.4",
    ("fp8", "head"): "128.128.4.1 128.128.3.1 64.256.3.1 128.256.2.1 256.128.3.1",
}
# block_n.warps.stages
_DOT: dict[Kind, str] = {"none": "", "fp8": "", "int4": "64.4.4 128.8.4"}


def candidates(name: str, rows: int, kind: Kind) -> Iterator[SkinnyConfig | None]:
    """Cuts of a matrix that may be the best, torch's product (None) among them."""
    if rows == 1 or (kind == "int4" and rows <= 8):
        for block_n, block_k, warps in _numbers(_VECTOR.get((kind, name), "")):
            yield SkinnyConfig("vector", block_n, block_k, warps)
    if rows <= 16 and name != "head":
        for block_k, warps, stages in _numbers(_STREAM[kind]):
            yield SkinnyConfig("stream", 16, block_k, warps, stages)
    if rows > 1:
        for block_n, block_k, stages, splits, *stagger in _numbers(_TMA.get((kind, name), "")):
            warps = 8 if block_n == 256 else 4
            yield SkinnyConfig("tma", block_n, block_k, warps, stages, splits, stagger=bool(stagger))
        for block_n, warps, stages in _numbers(_DOT[kind]):
            yield SkinnyConfig("dot", block_n, 128, warps, stages)
        if kind == "none":
            yield None


def attention_candidates(rows: int, step: DecodeStep) -> Iterator[tuple[int, DecodeConfig]]:
    """Splits to launch and how each is cut: as many programs as fit at once, or a few times as many."""
    programs = rows * step.config.num_kv_heads
    for keys, stages, together in (
        *((32, 3, together) for together in (2, 4, 6, 8)),
        *((32, 2, together) for together in (3, 6)),
        *((32, 4, together) for together in (1, 2)),
        (32, 6, 1),
        *((64, 3, together) for together in (1, 2, 4)),
        *((16, 6, together) for together in (2, 4, 8)),
        *((16, 4, together) for together in (3, 6)),
    ):
        splits = max(1, round(together * 132 / programs))
        if splits <= MAX_SPLITS:
            yield max(4, splits), DecodeConfig(keys, 4, stages, splits, min_keys=64)


def _numbers(text: str) -> Iterator[list[int]]:
    for cut in text.split():
        yield [int(number) for number in cut.split(".")]
