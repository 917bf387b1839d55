"""Adapters in serving: preallocated buffers of all slots, filled in place, and their part in one step."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.lora.rows import LoraRows
from kernels.lora import add_lora, add_lora_mixed, slot_rows
from services.common.errors import AdapterRejected
from services.engine.models.batch import ForwardBatch
from services.engine.models.config import ModelConfig
from services.engine.models.lora.binding import BoundAdapter
from services.engine.models.lora.targets import LORA_GROUPS, Group, TargetBuffers, layer_groups

if TYPE_CHECKING:
    from services.engine.models.lora.upload import AdapterUpload, UploadPlan

_PIECE_BYTES = 8 * 2**20
"""Size of the pieces in which an adapter is copied. A copy of this size holds up the small ones of a step by 0.2 ms at
most."""
_LAYOUTS = 16
"""Most layouts whose upload plans are kept, of 100 KB each for an adapter on all layers of a 4B model."""


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
class _Prepared:
    """Upload plan of one layout, which all adapters of that layout share."""

    groups: Set[tuple[int, str]]
    """Layers and groups that it has a target in."""
    ranks: Tensor
    """[layers, groups] int32 on the CPU."""
    plan: UploadPlan | None
    """Plan of the upload; None on the CPU."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """The adapters one step uses."""

    only: int | None
    """Slot of all rows, or None if rows differ."""
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
        modules = {path for layer in range(config.num_layers) for path in config.linear_shapes(layer)}
        orders = {path: order for path in modules if (order := config.output_order(path)) is not None}
        self._reordered = next(iter(orders), None)
        """The module whose outputs lie as config.output_order() says."""
        self._output_order = torch.tensor(orders.get(self._reordered or "", (0,)), dtype=torch.int64)
        self._layers: list[dict[str, _GroupBuffers]] = []
        for layer in range(config.num_layers):
            groups: dict[str, _GroupBuffers] = {}
            for group in layer_groups(config, layer):
                a = torch.zeros(num_slots, len(group.targets), max_rank, group.in_features, dtype=dtype, device=device)
                b = torch.zeros(num_slots, max_rank, group.out_features, dtype=dtype, device=device)
                bs = tuple(b[:, :, target.offset : target.offset + target.out_features] for target in group.targets)
                groups[group.name] = _GroupBuffers(group, a, b, bs, tuple(target.offset for target in group.targets))
            self._layers.append(groups)
        self._filled: dict[int, set[tuple[int, str]]] = {}
        """Slot → layer and group of all that is not zero."""
        self._known: dict[tuple[object, int], _Prepared] = {}
        """Layout of an adapter and its address modulo 16 → what loads of it have in common."""
        # Of each layer and group: an adapter of a few modules costs nothing at the others. Each begins at 16 bytes, so
        # that all layers run the same variant of a kernel.
        shape = (config.num_layers, len(LORA_GROUPS), -(-num_slots // 4) * 4)
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        # Loads run beside the steps, not between them: a stream of their own.
        self._stream: torch.cuda.Stream | None = None
        self._upload: AdapterUpload | None = None
        if torch.device(device).type == "cuda":
            # Imported here: a pod without a GPU needs no Triton.
            from services.engine.models.lora.upload import AdapterUpload

            if num_slots > 1:
                self._upload = AdapterUpload(
                    self.target_buffers(), self._output_order, self.upload_bytes(config, max_rank)
                )
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

    @staticmethod
    def upload_bytes(config: ModelConfig, max_rank: int) -> int:
        """Bytes of a GPU that adapters on their way take, however many slots there are."""
        widest = max(max(shape) for layer in range(config.num_layers) for shape in config.linear_shapes(layer).values())
        return max(_PIECE_BYTES, 4 * max_rank * widest + 64)

    def target_buffers(self) -> list[TargetBuffers]:
        """Adapter matrices of each linear layer on the device, by layer."""
        return [
            TargetBuffers(
                f"layers.{index}.{target.module}",
                (index, name),
                buffers.a[:, number],
                buffers.bs[number],
                target.module == self._reordered,
            )
            for index, groups in enumerate(self._layers)
            for name, buffers in groups.items()
            for number, target in enumerate(buffers.group.targets)
        ]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles what loads launch, so that the first one need not wait for it."""
        if self._upload is not None:
            with self._beside_the_steps():
                self._upload.warm_up()

    @torch.inference_mode()
    def pretend(self, rank: int) -> None:
        """Has kernels take every empty slot for an adapter of so high a rank, whose numbers are zeros: for measuring,
        before the first load. 0: for what it is."""
        self._ranks[:, :, 1:] = rank

    @torch.inference_mode()
    def load(self, slot: int, adapter: BoundAdapter) -> None:
        """Writes an adapter into a slot that no running request uses.

        Raises:
            AdapterRejected: its rank is over max_rank, or a value is not finite. The slot then adds nothing, or what it
                added before.
            ValueError: slot 0 or a slot out of range.
        """
        address, known = 0, None
        if adapter.layout is not None and self._upload is not None:
            address = np.frombuffer(adapter.data, np.uint8).__array_interface__["data"][0]
            known = self._known.get((adapter.layout, address % 16))
        prepared = known or self._prepare(adapter)
        with self._beside_the_steps():
            self._zero(slot, kept=prepared.groups)
            self._filled.setdefault(slot, set()).update(prepared.groups)
            if self._upload is None or prepared.plan is None:
                self._write(slot, adapter, prepared.groups)
            elif not self._upload.write(slot, prepared.plan, address if known else 0):
                self._zero(slot)
                adapter.check_finite()  # names the tensor
                raise RuntimeError("an adapter's values are finite on the CPU and not on the device")
            self._ranks[:, :, slot] = prepared.ranks.to(self._ranks.device)
        if known is None and address:
            self._remember(adapter, address, prepared)

    def _prepare(self, adapter: BoundAdapter) -> _Prepared:
        """Raises AdapterRejected if its rank is over max_rank or, on the CPU, a value is not finite."""
        if adapter.max_rank > self.max_rank:
            raise AdapterRejected(f"the adapter's rank {adapter.max_rank} is over the limit of {self.max_rank}")
        groups, ranks = self._groups_of(adapter), self._ranks_of(adapter)
        if self._upload is None:
            adapter.check_finite()
            return _Prepared(groups, ranks, None)
        return _Prepared(groups, ranks, self._upload.plan(adapter, groups))

    def _remember(self, adapter: BoundAdapter, address: int, prepared: _Prepared) -> None:
        """Keeps what the next adapter of the same layout needs too."""
        plan = prepared.plan.relative(address, len(adapter.data)) if prepared.plan is not None else None
        if plan is None:  # a tensor had to be moved to where its numbers are aligned
            return
        if len(self._known) >= _LAYOUTS:
            self._known.clear()
        self._known[adapter.layout, address % 16] = replace(prepared, plan=plan)

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

    def _write(self, slot: int, adapter: BoundAdapter, groups: Set[tuple[int, str]]) -> None:
        """The copies of AdapterUpload.write(), on the CPU."""
        for index, name in sorted(groups):
            buffers = self._layers[index][name]
            a, b = buffers.a[slot].zero_(), buffers.b[slot].zero_()
            largest = torch.finfo(b.dtype).max
            for place, target in enumerate(buffers.group.targets):
                bound = adapter.targets.get(f"layers.{index}.{target.module}")
                if bound is None:
                    continue
                # Rows of other adapters are multiplied by zeros beside it, and zero times infinity is not zero.
                a[place, : bound.rank] = bound.a.float().clamp(-largest, largest)
                scaled = (bound.b.float() * bound.scale).clamp_(-largest, largest)
                if target.module == self._reordered:
                    scaled = scaled[self._output_order]
                b[: bound.rank, target.offset : target.offset + target.out_features] = scaled.t()

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
        filled = self._filled.get(slot, set())
        for index, name in filled - kept:
            buffers = self._layers[index][name]
            buffers.a[slot].zero_()
            buffers.b[slot].zero_()
        filled &= kept

    @contextmanager
    def _beside_the_steps(self) -> Iterator[None]:
        """Stream for copies: they are done when the block ends, and no step on another stream waits for them."""
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
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
