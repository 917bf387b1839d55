"""The only things that the fused forward sees of the outside: the rows of one step on the device, and the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.attention.decode import DecodeConfig, DecodeWorkspace
from kernels.gpu.attention.pages import KvPages, StackedPages
from kernels.gpu.copies.state_copy import copy_states
from kernels.gpu.delta.waiting_writes import WaitingWrites
from kernels.gpu.segments import Segments
from services.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step: decodes first, then prefill segments. All int32.

    With draft tokens decodes come in groups of rows, of which the first ones have a token, and there are no segments.
    Padding and a group's other rows have slot 0 and position 0; their results mean nothing and change nothing but
    scratch memory.
    """

    tokens: Tensor
    """[T]; -1: the token that was sampled last for the row's slot."""
    positions: Tensor
    """[T]."""
    slots: Tensor
    """[T]: state slot, which is also the row of the block tables."""
    adapters: Tensor
    """[T]: LoRA slot, 0 for none."""
    active_adapters: Tensor
    """[1 + n]: how many distinct LoRA slots the step uses, then these slots (see kernels.gpu.lora.batch.LoraRows)."""
    decodes: int
    """The first rows, of sequences that continue from the cache."""
    segments: Segments | None
    """The other rows; None: there are none."""
    group: int = 1
    """Rows of a sequence among the decodes: its newest token and draft tokens behind it."""
    next_ids: Tensor | None = None
    """[T]: the token behind each row's, for the mtp layer; what the step samples itself is filled in later."""

    @property
    def mixed(self) -> bool:
        """True if some rows are computed as decodes are and others as prefills are."""
        return self.decodes > 0 and self.segments is not None


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Launch parameters of decode attention for one batch size."""

    splits: int
    """Parts into which each context is cut, at most."""
    workspace: DecodeWorkspace
    """Shared by all layers: launches on a stream follow each other."""
    config: DecodeConfig | None = None
    """None: that of the model's kernel_configs() for the rows of a step."""


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Paged keys and values, and the state pools of all DeltaNet layers in one tensor each.

    Preallocated and updated in place. Block 0 and slot 0 are scratch: padding writes there and nobody reads it."""

    stacked: StackedPages
    """Pages of all full-attention layers, and behind them of the drafter's layers if there is one."""
    pages: Sequence[KvPages]
    """Pages of each full-attention layer, views of ``stacked``."""
    conv: Tensor
    """[linear layers, num_slots, kernel - 1, conv_dim], model dtype."""
    recurrent: Tensor
    """[linear layers, num_slots, value_heads, key_dim, value_dim] float32 or bfloat16."""
    block_size: int
    waiting: WaitingWrites | None = None
    """Writes that are not in ``recurrent`` yet, [linear layers, num_slots, ...]; None: states are always written
    back."""
    verified: Tensor | None = None
    """[linear layers, rows, conv_dim], model dtype: inputs of the convolution in rows with draft tokens, until it is
    known which of them count; None: there are no draft tokens."""

    @property
    def num_slots(self) -> int:
        return self.conv.shape[1]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        draft_layers: int = 0,
        waiting_writes: int = 0,
        verified_rows: int = 0,
    ) -> DeviceCache:
        """Zeroed caches. Both numbers count the scratch block and slot.

        Args:
            dtype: of the model.
            kv_dtype: of the pages: float8_e4m3fn, or None for the model's.
            draft_layers: layers of the drafter, which have pages too.
            waiting_writes: of a state, until it is written back; 0: it always is.
            verified_rows: most rows of a step with draft tokens; 0: there are none.
        """
        layout = config.cache_layout
        linear = layout.state_layers
        heads, key_dim, value_dim = layout.state_heads, layout.state_key_dim, layout.state_value_dim
        stacked = StackedPages.allocate(
            layout.kv_layers + draft_layers,
            num_blocks,
            block_size,
            layout.kv_heads,
            layout.head_dim,
            kv_dtype or dtype,
            device,
        )
        return cls(
            stacked=stacked,
            pages=stacked.layers(),
            conv=torch.zeros(
                linear, num_slots, layout.conv_kernel - 1, layout.conv_channels, dtype=dtype, device=device
            ),
            recurrent=torch.zeros(linear, num_slots, heads, key_dim, value_dim, dtype=state_dtype, device=device),
            block_size=block_size,
            waiting=WaitingWrites.allocate(
                linear,
                num_slots,
                heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                room=waiting_writes,
                dtype=dtype,
                device=device,
            )
            if waiting_writes
            else None,
            verified=torch.zeros(linear, verified_rows, layout.conv_channels, dtype=dtype, device=device)
            if verified_rows
            else None,
        )

    def copy_states(self, pairs: Tensor) -> None:
        """Copies states between slots, [n, 2] int32 of source and target, a kernel a pool."""
        for pool in self.state_pools():
            copy_states(pool, pairs)

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies keys and values between blocks in all layers, [n, 2] int32 of source and target."""
        if pairs.shape[0]:
            for pool in self.stacked.pools():
                copy_states(pool.view(torch.int32), pairs)

    def state_pools(self) -> tuple[Tensor, ...]:
        """All that belongs to slots, [linear layers, num_slots, ...] each."""
        return (self.conv, self.recurrent, *(self.waiting.pools() if self.waiting else ()))

    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        verified = () if self.verified is None else (self.verified,)
        return [*self.state_pools(), *self.stacked.pools(), *verified]
