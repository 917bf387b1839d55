"""The only things a model sees of the outside: the buffers of one step and the caches they index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Batch of one step over ``S`` sequences and ``T`` tokens, flattened without padding; decodes (one token each)
    first."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    kv_slots: Tensor
    """[T] int64: flat index ``block * block_size + offset`` where each token's K and V go."""
    block_tables: Tensor
    """[S, max_blocks] int64, padded with block 0."""
    state_slots: Tensor
    """[S] int64: state slot of each sequence."""
    adapter_slots: Tensor
    """[S] int64: LoRA slot of each sequence, 0 for none."""
    has_adapters: bool
    """False lets the model skip LoRA altogether."""
    num_decodes: int
    """The first num_decodes sequences have exactly one token."""
    lengths: Sequence[int]
    """[S] tokens of each sequence in this step."""
    starts: Sequence[int]
    """[S] tokens of each sequence already in the cache. 0: the state slot holds garbage and must be treated as zero."""
    logit_rows: Tensor
    """[R] int64: rows of the flat batch whose hidden state is returned."""
    verifies: bool = False
    """True if all sequences decode, some with draft tokens behind their newest one."""


@dataclass(frozen=True, slots=True)
class CacheBuffers:
    """Paged KV of the full-attention layers and state slots of the DeltaNet layers, preallocated and updated in place.

    Block 0 and slot 0 are scratch: padded rows write there and nobody reads them.
    """

    keys: Sequence[Tensor]
    """Key pool of each full-attention layer, and of the mtp layer if it is loaded: [num_blocks, block_size, kv_heads,
    head_dim]."""
    values: Sequence[Tensor]
    conv_states: Sequence[Tensor]
    """Convolution state pool of each DeltaNet layer: [num_slots, conv_dim, kernel - 1], model dtype."""
    recurrent_states: Sequence[Tensor]
    """Recurrent state pool of each DeltaNet layer: [num_slots, value_heads, key_dim, value_dim] float32."""
    block_size: int

    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [*self.keys, *self.values, *self.conv_states, *self.recurrent_states]
