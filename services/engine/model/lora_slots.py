"""Adapters in serving: preallocated buffers of all slots, filled in place, and their part in one step."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.lora_rows import LoraRows
from kernels.lora import add_lora, add_lora_mixed, slot_rows
from services.common.errors import AdapterRejected
from services.engine.model.batch import ForwardBatch
from services.engine.model.config import ModelConfig
from services.engine.model.loader import query_row_order
from services.engine.model.lora_binding import BoundAdapter
from services.engine.model.lora_targets import LORA_GROUPS, Group, layer_groups
from services.engine.model.upload import Uploader

_STAGING_BYTES = 4 * 2**20
"""Page-locked, twice: copies from there do not hold up the launches of the thread that serves."""


@dataclass(frozen=True, slots=True)
class _GroupBuffers:
    """The adapters of one group of linear layers."""

    group: Group
    a: Tensor
    """[slots, targets, max_rank, in]; rows beyond an adapter's rank are zero."""
    b: Tensor
    """[slots, max_rank, all outputs]: Bᵀ times the adapter's scale, the targets side by side."""
    bs: tuple[Tensor, ...]
    """Per target [slots, max_rank, out]: its columns of b."""
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Selection:
    """The adapters one step uses."""

    only: int | None
    """The one slot of all rows, or None if rows differ."""
    distinct: Tensor | None
    """Slots to compute with; None: all of them."""
    rows: Tensor | None
    """[T, slots computed] mask."""


class LoraLayer:
    """The adapters of one layer in one step."""

    def __init__(self, buffers: dict[str, _GroupBuffers], selection: _Selection) -> None:
        self._buffers, self._selection = buffers, selection

    def add(self, group: str, x: Tensor, out: Tensor) -> None:
        """Adds each row's adapter to a group's fused output, in place.

        Args:
            group: "in", "out", "gate_up" or "down".
            x: [T, in].
            out: [T, all outputs of the group].
        """
        buffers, use = self._buffers[group], self._selection
        if use.only is not None:
            add_lora(x, buffers.a[use.only], [b[use.only] for b in buffers.bs], buffers.offsets, out)
            return
        a, bs = buffers.a, buffers.bs
        if use.distinct is not None:
            a = a.index_select(0, use.distinct)
            bs = tuple(b.index_select(0, use.distinct) for b in bs)
        if use.rows is not None:
            add_lora_mixed(x, a, bs, buffers.offsets, use.rows, out)


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The adapters of one step."""

    layers: tuple[LoraLayer, ...]

    def layer(self, index: int) -> LoraLayer:
        return self.layers[index]


class LoraSlots:
    """Stacked A and B of every adapter slot; slot 0 is "no adapter" and stays zero.

    The buffers are allocated once and only written in place: their addresses never change.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        invariant: bool = False,
    ) -> None:
        """``num_slots`` counts slot 0: num_slots - 1 adapters fit. ``invariant``: of LoraRows."""
        if num_slots < 1 or max_rank < 1:
            raise ValueError(f"num_slots and max_rank must be at least 1, got {num_slots} and {max_rank}")
        self.num_slots, self.max_rank = num_slots, max_rank
        self._invariant = invariant
        self._query_rows = query_row_order(config)
        self._layers: list[dict[str, _GroupBuffers]] = []
        for layer in range(config.num_layers):
            groups: dict[str, _GroupBuffers] = {}
            for group in layer_groups(config, layer):
                a = torch.zeros(num_slots, len(group.targets), max_rank, group.in_features, dtype=dtype, device=device)
                b = torch.zeros(num_slots, max_rank, group.out_features, dtype=dtype, device=device)
                bs = tuple(b[:, :, target.offset : target.offset + target.out_features] for target in group.targets)
                groups[group.name] = _GroupBuffers(group, a, b, bs, tuple(target.offset for target in group.targets))
            self._layers.append(groups)
        self._filled: set[tuple[int, int, str]] = set()
        """Slot, layer and group of all that is not zero."""
        # Of each layer and group: an adapter of a few modules costs nothing at the others. Each begins at 16 bytes, so
        # that all layers run the same variant of a kernel.
        shape = (config.num_layers, len(LORA_GROUPS), -(-num_slots // 4) * 4)
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        # Loads run beside the steps, not between them: a stream of their own.
        self._stream: torch.cuda.Stream | None = None
        self._uploader: Uploader | None = None
        if torch.device(device).type == "cuda":
            self._uploader = Uploader(torch.device(device), _STAGING_BYTES)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @staticmethod
    def bytes_per_slot(config: ModelConfig, max_rank: int, dtype: torch.dtype) -> int:
        """Bytes that one slot takes."""
        elements = sum(
            max_rank * (group.in_features + target.out_features)
            for layer in range(config.num_layers)
            for group in layer_groups(config, layer)
            for target in group.targets
        )
        return elements * dtype.itemsize

    @torch.inference_mode()
    def load(self, slot: int, adapter: BoundAdapter) -> None:
        """Writes an adapter into a slot that no running request uses.

        Raises:
            AdapterRejected: its rank is over max_rank.
        """
        if adapter.max_rank > self.max_rank:
            raise AdapterRejected(f"the adapter's rank {adapter.max_rank} is over the limit of {self.max_rank}")
        with self._beside_the_steps():
            self._zero(slot, kept=self._groups_of(adapter))
            self._write(slot, adapter)
            self._ranks[:, :, slot] = self._ranks_of(adapter).to(self._ranks.device)

    def _groups_of(self, adapter: BoundAdapter) -> set[tuple[int, str]]:
        """Layers and groups that it has a target in."""
        return {
            (index, name)
            for index, groups in enumerate(self._layers)
            for name, buffers in groups.items()
            if any(f"layers.{index}.{target.module}" in adapter.targets for target in buffers.group.targets)
        }

    def _ranks_of(self, adapter: BoundAdapter) -> Tensor:
        """[layers, groups] int32: the largest rank of the adapter's targets in each group, 0 where it has none."""
        return torch.tensor(
            [
                [
                    max(
                        (
                            adapter.targets[path].rank
                            for target in groups[name].group.targets
                            if (path := f"layers.{index}.{target.module}") in adapter.targets
                        ),
                        default=0,
                    )
                    for name in LORA_GROUPS
                ]
                for index, groups in enumerate(self._layers)
            ],
            dtype=torch.int32,
        )

    def _write(self, slot: int, adapter: BoundAdapter) -> None:
        """Each group as it will lie in its buffers, made on the CPU: what reaches a GPU are copies alone, by an engine
        that the steps leave idle, and not a thousand small kernels that wait between those of the steps."""
        for index, name in sorted(self._groups_of(adapter)):
            buffers = self._layers[index][name]
            a = torch.zeros(buffers.a.shape[1:], dtype=buffers.a.dtype)
            b = torch.zeros(buffers.b.shape[1:], dtype=buffers.b.dtype)
            largest = torch.finfo(b.dtype).max
            for place, target in enumerate(buffers.group.targets):
                bound = adapter.targets.get(f"layers.{index}.{target.module}")
                if bound is None:
                    continue
                a[place, : bound.rank] = bound.a
                # Rows of other adapters are multiplied by zeros beside it, and zero times infinity is not zero.
                scaled = (bound.b.float() * bound.scale).clamp_(-largest, largest)
                if target.module == "self_attn.q_proj":
                    scaled = scaled[self._query_rows]
                b[: bound.rank, target.offset : target.offset + target.out_features] = scaled.t()
            self._filled.add((slot, index, name))
            self._copy(a, buffers.a[slot])
            self._copy(b, buffers.b[slot])

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if self._uploader is None:
            target.copy_(source)
        else:
            self._uploader.copy(source, target)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Makes a slot add nothing.

        Raises:
            ValueError: slot 0 or a slot out of range.
        """
        with self._beside_the_steps():
            self._zero(slot)

    def _zero(self, slot: int, kept: Set[tuple[int, str]] = frozenset()) -> None:
        """Everything of a slot but the groups ``kept``, which are written anew."""
        if not 0 < slot < self.num_slots:
            raise ValueError(f"slot must be between 1 and {self.num_slots - 1}, got {slot}")
        self._ranks[:, :, slot] = 0
        for filled in [each for each in self._filled if each[0] == slot and each[1:] not in kept]:
            buffers = self._layers[filled[1]][filled[2]]
            buffers.a[slot].zero_()
            buffers.b[slot].zero_()
            self._filled.remove(filled)

    @contextmanager
    def _beside_the_steps(self) -> Iterator[None]:
        """What is launched inside is done when it ends, and no step on another stream waits for it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def rows(self, layer: int, group: str, row_adapters: Tensor, active: Tensor) -> LoraRows:
        """The adapters of a layer's group for the kernels of kernels/gpu. Nothing is copied and every address stays
        the same for the life of the engine, so it can be made once and captured in CUDA graphs.

        Args:
            group: "in", "out", "gate_up" or "down".
            row_adapters: [T] int32 on the device: slot of each row, 0 for none.
            active: [1 + capacity] int32 on the device, from active_slots().
        """
        buffers = self._layers[layer][group]
        ends = tuple(target.offset + target.out_features for target in buffers.group.targets)
        ranks = self._ranks[layer, LORA_GROUPS.index(group), : self.num_slots]
        return LoraRows(buffers.a, buffers.b, ends, ranks, row_adapters, active, self._invariant)

    def step(self, batch: ForwardBatch) -> LoraStep | None:
        """The adapters of one batch, or None if no row has one."""
        selection = self._select(batch)
        if selection is None:
            return None
        return LoraStep(tuple(LoraLayer(groups, selection) for groups in self._layers))

    def _select(self, batch: ForwardBatch) -> _Selection | None:
        slots = batch.adapter_slots
        dtype = self._layers[0]["in"].a.dtype
        tokens = batch.token_ids.shape[0]
        if slots.device.type == "cpu":
            numbers = set(slots.tolist())
            if numbers == {0}:
                return None
            if len(numbers) == 1:
                return _Selection(numbers.pop(), None, None)
            distinct = torch.tensor(sorted(numbers - {0}), dtype=torch.int64)
            return _Selection(None, distinct, slot_rows(self._per_row(batch, tokens), distinct, dtype))
        # Looking at the slots would wait for the device: compute with all of them. Slot 0 is zero and adds nothing.
        everything = torch.arange(self.num_slots, device=slots.device)
        return _Selection(None, None, slot_rows(self._per_row(batch, tokens), everything, dtype))

    @staticmethod
    def _per_row(batch: ForwardBatch, tokens: int) -> Tensor:
        if batch.num_decodes == len(batch.lengths):
            return batch.adapter_slots
        counts = torch.tensor(batch.lengths, dtype=torch.int64).to(batch.adapter_slots.device)
        return torch.repeat_interleave(batch.adapter_slots, counts, output_size=tokens)
