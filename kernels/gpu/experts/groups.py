"""Tokens by expert: which rows each expert multiplies. Nothing waits for the device, and a launch has as many programs
as there may be tiles, so that a step can be captured as a CUDA graph."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.experts.routing import Routes

FEW_ROWS = 128
_FEW, _MANY = (1024, 4), (2048, 8)
"""Pairs that a program looks at together, and its warps, for up to so many rows and for more."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and a chosen expert by expert. Number t · chosen + j is the pair of token t and its expert j."""

    routes: Routes
    counts: Tensor
    """[experts] int32: pairs of each."""
    pairs: Tensor
    """[experts, T] int32: first the pairs of the expert, ascending; then anything. A token has an expert once."""

    def tiles(self, block_m: int) -> int:
        """Most tiles of ``block_m`` pairs, each of one expert, that there may be."""
        pairs = self.routes.experts.numel()
        return (pairs + min(pairs, self.routes.count) * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["total", "room"])
def _group_kernel(experts, counts, pairs, total, room, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program for an expert."""
    expert = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    found = 0
    for start in range(0, total, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(experts + pair, mask=pair < total, other=-1) == expert
        place = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(pairs + expert.to(tl.int64) * room + place, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + expert, found)


def group(routes: Routes, *, pdl: bool = False) -> Groups:
    """Sorts the pairs by expert, always in the same order."""
    counts = torch.empty(routes.count, dtype=torch.int32, device=routes.experts.device)
    pairs = torch.empty(routes.count, routes.rows, dtype=torch.int32, device=routes.experts.device)
    total = routes.experts.numel()
    block, warps = _FEW if routes.rows <= FEW_ROWS else _MANY
    _group_kernel[(routes.count,)](
        routes.experts, counts, pairs, total, routes.rows, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )
    return Groups(routes, counts, pairs)


@triton.jit
def locate(counts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile (EXPERTS: there are fewer tiles), the place of its first pair among that expert's, and how many
    that has."""
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    count = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(e == expert, count, 0), axis=0)
    return tl.minimum(expert, EXPERTS), (tile - before) * BLOCK_M, own
