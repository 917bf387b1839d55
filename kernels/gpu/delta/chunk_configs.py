"""Tile sizes of the chunked gated delta rule, how exact its products are, and when its long chains are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.segments import Segments


@dataclass(frozen=True, slots=True)
class PieceConfig:
    """Pieces that long chains are cut into, and tile sizes of the pass that finds the states between them.

    Raises:
        ValueError: a piece without a tile.
    """

    tiles: int
    """Fewest tiles of a piece: a chain of n tiles has n // tiles pieces of about the same length, one that is shorter
    than two of them is not cut."""
    block_v: int
    """Columns of a program: value dimensions of a piece's state, or key dimensions of its transition."""
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.tiles < 1:
            raise ValueError(f"a piece has 1 tile or more: {self}")


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Tile sizes, and how exact the products are.

    Raises:
        ValueError: a number of terms other than 1 or 2.
    """

    block_v: int
    """Value dimensions of a scan program; with all of them in one the gated norm needs no kernel of its own."""
    num_warps: int
    num_stages: int
    """Tiles of the scan in flight, the one at work included."""
    state_terms: int = 1
    """bfloat16 terms of the state as an operand: 1 rounds it to 2⁻⁹, 2 to 2⁻¹⁷. The state itself is float32."""
    tile_terms: int = 1
    """bfloat16 terms, likewise, of what tokens write and of a tile's own matrices."""
    inverse_terms: int = 1
    """float16 terms of the operands of the triangular inverse: 1 is as good as 2 if the result is rounded to one term
    of bfloat16, and takes two thirds of the time."""
    tile_warps: int = 4
    pieces: PieceConfig | None = None
    """None: one tile of a chain after the other. Otherwise the numbers of a long chain differ by rounding with where it
    is cut, so that nothing which must not depend on the batch may have pieces."""

    def __post_init__(self) -> None:
        if not {self.state_terms, self.tile_terms, self.inverse_terms} <= {1, 2}:
            raise ValueError(f"terms are 1 or 2: {self}")


# With 2 stages Triton asks for the next tile behind the work on this one and then waits for it.
FEW = ChunkConfig(block_v=32, num_warps=4, num_stages=3)
"""Tile sizes for one sequence: its tiles follow one another, so the time of each counts."""
MANY = ChunkConfig(block_v=64, num_warps=4, num_stages=3)
"""Two sequences of 32 heads fill the device with one program a multiprocessor."""
_MANY_BEFORE_HOPPER = ChunkConfig(block_v=32, num_warps=4, num_stages=2)
"""The same where products are not taken from shared memory: with 64 a thread would spill 432 bytes. Fits 99 KiB, and
163 KiB twice."""
EXACT = ChunkConfig(block_v=32, num_warps=4, num_stages=1)
"""float32 models: products are emulated in float32, for tests rather than speed."""


def many(device: DeviceLimits) -> ChunkConfig:
    """Tile sizes for many sequences."""
    return MANY if device.size == "wide" else _MANY_BEFORE_HOPPER


def pieces_of(tiles: int, device: DeviceLimits) -> PieceConfig:
    """Pieces of so many tiles: as wide as the scan's programs for many sequences."""
    return PieceConfig(tiles, many(device).block_v, num_warps=4, num_stages=3)


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """Microseconds on one architecture that say whether pieces pay (`benchmarks.tuning.sweep_pieces` measures them). In
    a wave every multiprocessor has one program."""

    few: float
    """A tile of a wave of the scan with FEW."""
    many: float
    """The same with many()."""
    ends: float
    """A tile of a wave of the pass that finds pieces' transitions and states."""
    join: float
    """One piece's state from that of the piece before."""
    launches: float
    """What the two kernels before the scan cost, however little they do."""

    def scan(self, shape: DeltaShape, chains: int, tiles: int, device: DeviceLimits) -> float:
        """Microseconds of the scan of so many chains, or pieces, of so many tiles each."""
        if _programs(shape, FEW.block_v, chains) <= device.multiprocessors:
            return tiles * self.few
        waves = -(-_programs(shape, many(device).block_v, chains) // device.multiprocessors)
        return waves * tiles * self.many

    def cut(self, shape: DeltaShape, chains: int, tiles: int, pieces: int, device: DeviceLimits) -> float:
        """Microseconds of all three passes over the same chains in so many pieces each, at least 2."""
        block, length = many(device).block_v, -(-tiles // pieces)
        states = (pieces - 1) * -(-shape.value_dim // block)
        transitions = (pieces - 2) * -(-shape.key_dim // block)
        waves = -(-(states + transitions) * shape.value_heads * chains // device.multiprocessors)
        before = self.launches + waves * length * self.ends + (pieces - 2) * self.join
        return before + self.scan(shape, chains * pieces, length, device)


TIMES = {90: PieceTimes(few=1.64, many=2.10, ends=1.54, join=5.8, launches=5.3)}
"""By architecture, where measured, on an H200: on no other is a chain cut."""
_PIECES = (2, 4, 8, 16)
_GAIN = 0.95
"""Share of the sequential scan's time that pieces may take at most: what is less than that is not worth a kernel."""


def chunk_config(
    shape: DeltaShape, segments: Segments, dtype: torch.dtype, device: DeviceLimits, times: PieceTimes | None = None
) -> ChunkConfig:
    """Tile sizes for as many chains as fit into ``segments``, each as long as the rest leaves room for.

    Args:
        times: the architecture's of TIMES if None.
    """
    if dtype == torch.float32:
        return EXACT
    chains = segments.max_chains
    times = times or TIMES.get(device.architecture)
    if times is not None:
        tiles = segments.max_tiles // chains
        costs = {n: times.cut(shape, chains, tiles, n, device) for n in _PIECES if n <= tiles}
        best = min(costs, key=costs.__getitem__, default=0)
        if best and costs[best] < _GAIN * times.scan(shape, chains, tiles, device):
            scan = _by_number(shape, chains * best, device)
            return replace(scan, pieces=pieces_of(tiles // best, device))
    return _by_number(shape, chains, device)


def _by_number(shape: DeltaShape, chains: int, device: DeviceLimits) -> ChunkConfig:
    return FEW if _programs(shape, FEW.block_v, chains) <= device.multiprocessors else many(device)


def _programs(shape: DeltaShape, block_v: int, chains: int) -> int:
    return -(-shape.value_dim // block_v) * shape.value_heads * chains
