"""Inputs that all layers of a step share: rotations, masks, layouts and state indices, computed once from the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.conv1d import ConvLayout
from kernels.gated_delta import ChunkLayout
from kernels.rope import Rotation, rope_tables
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.qwen3_5.config import Qwen3_5Config


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of the state pools that belong to a run of sequences."""

    slots: Tensor
    """[n] int64."""
    begin: int | None
    """First slot if the slots are consecutive and ascending: then the pool's own rows are used, without a copy."""

    @classmethod
    def of(cls, slots: Tensor) -> StateRows:
        begin = None
        if slots.device.type == "cpu":  # looking at them on another device would wait for it
            numbers = slots.tolist()
            if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
                begin = numbers[0]
        return cls(slots, begin)

    def take(self, pool: Tensor) -> Tensor:
        """[n, ...]: a view of the pool or a copy."""
        if self.begin is not None:
            return pool[self.begin : self.begin + len(self.slots)]
        return pool.index_select(0, self.slots)

    def put(self, pool: Tensor, values: Tensor) -> None:
        """Stores what take() gave, changed in place or computed anew."""
        if self.begin is None:
            pool.index_copy_(0, self.slots, values.to(pool.dtype))
            return
        rows = pool[self.begin : self.begin + len(self.slots)]
        if rows.data_ptr() != values.data_ptr():
            rows.copy_(values)


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences with one token that continue from the cache."""

    count: int
    states: StateRows
    tables: Tensor
    """[count, blocks of the longest context] int64."""
    length: int
    """Longest context, the new token included."""
    mask: Tensor | None
    """[count, 1, 1, length] bool; None if all contexts are equally long."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Run of one sequence's tokens in the flat batch."""

    begin: int
    end: int
    start: int
    """Position of the first token."""
    table: Tensor


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The other sequences, packed."""

    states: StateRows
    conv: ConvLayout
    chunks: ChunkLayout
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class Step:
    """Everything about one forward pass that does not depend on the layer."""

    cos: Tensor
    sin: Tensor
    qk_scale: Tensor
    """See query_key_scale()."""
    kv_slots: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None
    float8_from: int | None = None
    """First row that is multiplied with the copies of matrices that have one for prompts; None: no row is."""

    @property
    def num_decodes(self) -> int:
        return self.decode.count if self.decode else 0

    @classmethod
    def build(
        cls,
        batch: ForwardBatch,
        cache: CacheBuffers,
        config: Qwen3_5Config,
        rotation: Rotation,
        *,
        float8_prompts: bool = False,
    ) -> Step:
        """Also zeroes the states of sequences that start now: their slots hold what another sequence left.

        Args:
            float8_prompts: rows of prompts are multiplied with the copies for them.
        """
        cos, sin = rope_tables(batch.positions, rotation)
        fresh = [index for index, start in enumerate(batch.starts) if start == 0]
        if fresh:
            slots = batch.state_slots[torch.tensor(fresh, device=batch.state_slots.device)]
            for pool in (*cache.conv_states, *cache.recurrent_states):
                pool.index_fill_(0, slots, 0)
        count = batch.num_decodes
        return cls(
            cos=cos,
            sin=sin,
            qk_scale=query_key_scale(config, batch.token_ids.device),
            kv_slots=batch.kv_slots,
            decode=_decode_part(batch, cache.block_size) if count else None,
            prefill=_prefill_part(batch, cache.block_size, config) if count < len(batch.lengths) else None,
            float8_from=count if float8_prompts else None,
        )


def query_key_scale(config: Qwen3_5Config, device: torch.device) -> Tensor:
    """[2, 1, 1] float32: queries of the gated delta rule are scaled by 1/√key_dim, keys are not."""
    scale = torch.ones(2, 1, 1, device=device)
    scale[0] = config.linear_key_dim**-0.5
    return scale


def _decode_part(batch: ForwardBatch, block_size: int) -> DecodePart:
    count = batch.num_decodes
    contexts = [start + 1 for start in batch.starts[:count]]
    length = max(contexts)
    mask = None
    if min(contexts) < length:
        places = torch.arange(length, device=batch.positions.device)
        mask = (places <= batch.positions[:count, None])[:, None, None, :]
    blocks = -(-length // block_size)
    return DecodePart(count, StateRows.of(batch.state_slots[:count]), batch.block_tables[:count, :blocks], length, mask)


def _prefill_part(batch: ForwardBatch, block_size: int, config: Qwen3_5Config) -> PrefillPart:
    count, device = batch.num_decodes, batch.token_ids.device
    lengths = list(batch.lengths[count:])
    segments: list[Segment] = []
    begin = count
    for index, length in enumerate(lengths, start=count):
        start = batch.starts[index]
        table = batch.block_tables[index, : -(-(start + length) // block_size)]
        segments.append(Segment(begin, begin + length, start, table))
        begin += length
    states = StateRows.of(batch.state_slots[count:])
    return PrefillPart(
        states=states,
        conv=ConvLayout.build(lengths, config.conv_kernel, device),
        chunks=ChunkLayout.build(lengths, device),
        segments=segments,
    )
