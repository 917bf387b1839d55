"""Cuts of the products of experts, by the number of rows, the shape and what a GPU's shared memory holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.linear.skinny_configs import Kind


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer's experts."""

    count: int
    chosen: int
    """Experts a token."""
    hidden: int
    size: int
    """Width of an expert between its two products."""
    kind: Kind
    itemsize: int
    """Bytes of a number of x."""


@dataclass(frozen=True, slots=True)
class StreamTile:
    """Tile sizes of a product in which a token's experts are streamed for it alone."""

    block_n: int
    """Rows of an expert's matrix a program."""
    groups: int
    """Groups of 128 inputs of a load."""
    warps: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """Each token's experts by themselves: for a few tokens, which hardly share any."""

    gate_up: StreamTile
    down: StreamTile
    prefetch: int = 0
    """Most bytes of weights that kernels behind read to ask L2 for while the router decides."""


@dataclass(frozen=True, slots=True)
class GroupTile:
    """Tile sizes of a grouped product."""

    block_m: int
    """Pairs of a program."""
    block_n: int
    """Rows of an expert's matrix a program."""
    block_k: int
    """Inputs of a load. fp8: a multiple of 128; int4: one group of 128, whatever this says."""
    warps: int
    stages: int

    def shared_memory(self, kind: Kind, itemsize: int, *, float8: bool = False) -> int:
        """Bytes of the tiles on their way."""
        inputs = 128 if kind == "int4" else self.block_k
        weight = {"none": itemsize * inputs, "fp8": inputs, "int4": inputs // 2}[kind]
        return self.stages * (self.block_n * weight + self.block_m * inputs * (1 if float8 else itemsize))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Tokens by expert, each expert's weights read for a tile of them."""

    gate_up: GroupTile
    down: GroupTile
    float8: bool = False
    """Inputs quantized by row, multiplied on the float8 tensor cores (fp8 weights only)."""


Cut = Streamed | Grouped
_MOST_STREAMED = 4
_LANES, _MOST_WARPS = 8 * 32, 4
"""Numbers of x that a warp reads together, 16 bytes a thread, and most warps of a streamed product."""
_FLOAT8_STREAMED = StreamTile(2, 4, warps=1), StreamTile(4, 4, warps=1)
"""gate_up and down of float8, as found inside a step of one token (benchmarks.tuning.experts_step): 78 and 45 µs of
2,060 less than by stream_tile()."""
_BY_PAIRS = ((16, 16, 64, 4), (32, 32, 64, 4), (64, 64, 128, 8), (math.inf, 128, 128, 8))
"""Pairs an expert up to which a tile of block_m, block_n and warps is for."""
_FLOAT8_PAIRS = 64
"""Pairs an expert from which the products, and not reading the weights, take the time; the last tile's."""


def choose(rows: int, shape: ExpertShape, device: DeviceLimits) -> Cut:
    """The cut for so many tokens."""
    if rows <= _MOST_STREAMED:
        gate_up, down = _FLOAT8_STREAMED
        if shape.kind != "fp8":
            gate_up, down = stream_tile(8, shape.hidden, shape.kind), stream_tile(2, shape.size, shape.kind)
        # One token leaves memory idle while its router decides; four gain nothing, and lose 35 of 3,710 µs.
        return Streamed(gate_up, down, prefetch=device.l2 // 4 if rows == 1 else 0)
    float8 = device.float8 and shape.kind == "fp8" and rows * shape.chosen > _FLOAT8_PAIRS * shape.count
    tile = fitting(_by_pairs(rows, shape, float8=float8), shape, device, float8=float8)
    return Grouped(tile, tile, float8)


def stream_tile(block_n: int, inputs: int, kind: Kind) -> StreamTile:
    """Tile of a streamed product with so many inputs: its warps read a row of x in 16 bytes a thread just as they read
    rows of the weight, or x would go through shared memory to where it is wanted, at a dozen barriers."""
    words = {"none": 128, "fp8": 64, "int4": 32}[kind]
    groups = _LANES // words
    while groups < min(inputs / 128, _MOST_WARPS * _LANES / words):
        groups *= 2
    return StreamTile(block_n, groups, warps=groups * words // _LANES)


def _by_pairs(rows: int, shape: ExpertShape, *, float8: bool = False) -> GroupTile:
    """Tile for so many pairs an expert, before it is made to fit."""
    found = next(tile for tile in _BY_PAIRS if rows * shape.chosen <= tile[0] * shape.count)
    # Decoding weights takes registers.
    block_m = found[1] if shape.kind == "none" or float8 else min(found[1], 64)
    return GroupTile(block_m, found[2], 128 if block_m <= 32 or shape.kind == "fp8" else 64, found[3], stages=4)


def rows_that_differ(count: int, chosen: int) -> tuple[int, ...]:
    """Least numbers of rows that choose() cuts otherwise than fewer."""
    grouped = (int(most * count / chosen) + 1 for most, *_ in _BY_PAIRS if math.isfinite(most))
    return (_MOST_STREAMED + 1, *grouped)


def invariant(shape: ExpertShape, device: DeviceLimits) -> Grouped:
    """The cut for any number of tokens: a token's bits then do not depend on how many there are."""
    tile = fitting(GroupTile(16, 64, 128, warps=4, stages=3), shape, device)
    return Grouped(tile, tile)


def training(rows: int, shape: ExpertShape, device: DeviceLimits) -> tuple[GroupTile, GroupTile]:
    """Tiles of the products of a training step: forward, and backward in the inputs."""
    tile = _by_pairs(rows, shape)
    # Backward a tile of gradients and one of decoded weights are on their way, both of the dtype of x.
    plain = replace(shape, kind="none")
    backward = fitting(replace(tile, block_n=128, block_k=64, stages=3), plain, device)
    return fitting(tile, shape, device), backward


def fitting(tile: GroupTile, shape: ExpertShape, device: DeviceLimits, *, float8: bool = False) -> GroupTile:
    """The tile with as many loads in flight as fit, and smaller if even two do not.

    Raises:
        ValueError: no tile fits.
    """
    while tile.shared_memory(shape.kind, shape.itemsize, float8=float8) > device.shared_memory - _SPARE:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.block_m > 16 or tile.block_n > 32:
            tile = replace(tile, block_m=max(16, tile.block_m // 2), block_n=max(32, tile.block_n // 2), stages=4)
        else:
            raise ValueError(f"experts: no tile fits {device.shared_memory} bytes of shared memory")
    return tile


_SPARE = 2048
"""Bytes of shared memory for what the compiler moves between threads."""
