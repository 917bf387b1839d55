"""Draft tokens that a block drafter draws behind a step, all at once.

Reference: services/engine/executors/cpu/speculation.py. `draft_tokens.accept` has put the first row of each chunk into
a chain. `place_block` places the rows behind it, and `take_block` takes the draft tokens of all.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling.draft_tokens import COUNTED, ERROR, FLAGS_WORD, ROOM_OF_SLOT, Chain, SlotTokens


class _Block(NamedTuple):
    slots: Any
    positions: Any
    step: Any


@dataclass(frozen=True, slots=True)
class Block:
    """Rows from which all draft tokens of a step are drawn at once, ``count`` a chunk, int32 at fixed addresses."""

    count: int
    """Draft tokens of a chunk."""
    slots: Tensor
    """[C · (count - 1)]: of the rows of the drafter behind a chunk's first one; 0: the blocks of the slot end there."""
    positions: Tensor
    """[C · (count - 1)]."""
    step: Tensor
    """[3, C · count]: what the sampler needs of a row."""
    drafted: Tensor
    """[C · count, COUNTED]: -1, no row knows of the draft tokens before it."""

    @classmethod
    def allocate(cls, chunks: int, count: int, device: torch.device | str) -> Block:
        """Rows at which nothing is drawn."""
        rows = chunks * (count - 1)
        slots, positions = torch.zeros(2, -(-max(1, rows) // 4) * 4, dtype=torch.int32, device=device)[:, :rows]
        step = torch.zeros(3, chunks * count, dtype=torch.int32, device=device)
        drafted = torch.full((chunks * count, COUNTED), -1, dtype=torch.int32, device=device)
        return cls(count, slots, positions, step, drafted)

    def arguments(self) -> _Block:
        return _Block(self.slots, self.positions, self.step)


@triton.jit(do_not_specialize=["chain_stride", "block_stride", "count"])
def _place_block_kernel(chain, chain_stride, block, block_stride, count):
    chunk = tl.program_id(0)
    slot = tl.load(chain.slots + chunk)
    position = tl.load(chain.positions + chunk)
    room = tl.load(chain.room + chunk)
    generated = tl.load(chain.step + chain_stride + chunk)
    for index in range(count):
        row = chunk * count + index
        tl.store(block.step + row, slot)
        tl.store(block.step + block_stride + row, generated + index)
        tl.store(block.step + 2 * block_stride + row, -1)
    for index in range(1, count):
        place = chunk * (count - 1) + index - 1
        held = (slot > 0) & (position + index < room)
        tl.store(block.slots + place, tl.where(held, slot, 0))
        tl.store(block.positions + place, tl.where(held, position + index, 0))


def place_block(chain: Chain, block: Block) -> None:
    """Places the rows of a block behind those that `accept` has put into the chain, which stays as it is.

    Args:
        chain: of C chunks.
        block: of as many, changed.
    """
    strides = chain.step.stride(0), block.step.stride(0)
    arguments = (chain.arguments(), strides[0], block.arguments(), strides[1], block.count)
    _place_block_kernel[(chain.slots.shape[0],)](*arguments, num_warps=1)


@triton.jit(do_not_specialize=["result_stride", "count"])
def _take_block_kernel(results, result_stride, slots, chain, count):
    chunk = tl.program_id(0)
    slot = tl.load(chain.slots + chunk)
    for index in range(count):
        result = results + (chunk * count + index) * result_stride
        failed = (tl.load(result + FLAGS_WORD) & ERROR) != 0
        token = tl.where(failed, 0, tl.load(result))
        tl.store(slots.drafts + slot * ROOM_OF_SLOT + index, token, mask=slot > 0)


def take_block(results: Tensor, slots: SlotTokens, chain: Chain, count: int) -> None:
    """Takes the draft tokens that were drawn at once. Behind the end of a slot's blocks they are whatever they were.

    Args:
        results: [≥ C · count, ≥ 4] int32, of the sampler.
        chain: of C chunks.
        count: of a chunk.
    """
    arguments = (results, results.stride(0), slots.arguments(), chain.arguments(), count)
    _take_block_kernel[(chain.slots.shape[0],)](*arguments, num_warps=1)
