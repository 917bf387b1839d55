"""The integers of one step on the device: one pinned buffer on the host, one copy, views at fixed addresses.

A step has a shape: the capacity of its decode part and of its prefill part. All steps of a shape keep their integers at
the same places of one device buffer, so that a CUDA graph captured for the shape serves them all. Steps follow each
other on one stream, so one device buffer is enough; the host fills the next buffer while the device still reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.segments import TILE, Segments
from services.engine.executors.cuda.block_tables import TableEntries
from services.engine.executors.cuda.stream import Arrival, EngineStream
from services.engine.models.device_batch import StepRows
from services.engine.scheduler.step_plan import BlockCopy, Chunk, StateCopy, split_at_snapshots

_ALIGN = 4
"""Words: a section starts at a multiple of 16 bytes, so that every step runs the same variant of a Triton kernel."""

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Capacities of one step: rows [0, decodes) are decodes, rows [decodes, rows) prefill segments.

    Raises:
        ValueError: the capacities contradict each other.
    """

    decodes: int
    rows: int
    segments: int = 0
    tiles: int = 0
    group: int = 1
    """Rows of each sequence among the decodes: its newest token and draft tokens behind it."""
    chains: int = 0
    """Sequences among the segments, where that is known: a chunk with snapshots has several. 0: any number of them."""

    def __post_init__(self) -> None:
        prefill = self.rows - self.decodes
        if min(self.decodes, prefill, self.segments, self.tiles) < 0 or self.rows < 1:
            raise ValueError(f"malformed {self}")
        if (prefill > 0) != (self.segments > 0) or (prefill > 0) != (self.tiles > 0):
            raise ValueError(f"{self}: a prefill needs segments and tiles")
        if self.group < 1 or self.decodes % self.group or (self.group > 1 and prefill > 0):
            raise ValueError(f"{self}: a step with draft tokens has groups of rows, and no prefill")

    @classmethod
    def of(cls, decodes: int, lengths: Sequence[int], *, chains: int = 0) -> StepShape:
        """Shape that fits exactly these decodes, of one row each, and segment lengths."""
        tiles = sum(-(-length // TILE) for length in lengths)
        return cls(decodes, decodes + sum(lengths), len(lengths), tiles, chains=chains)

    @classmethod
    def of_groups(cls, sequences: int, group: int) -> StepShape:
        """Shape of so many decodes with ``group`` rows each."""
        return cls(sequences * group, sequences * group, group=group)

    def holds(self, other: StepShape) -> bool:
        """True if a step of the other shape can run in this one."""
        return (
            self.group == other.group
            and (self.decodes > 0) == (other.decodes > 0)
            and (self.segments > 0) == (other.segments > 0)
            and self.decodes >= other.decodes
            and self.rows - self.decodes >= other.rows - other.decodes
            and self.segments >= other.segments
            and self.tiles >= other.tiles
        )


class _Sections:
    """Offsets of the parts of a step of one shape in the buffer, in words."""

    def __init__(self, shape: StepShape, adapter_slots: int, next_ids: bool) -> None:
        rows, segments = shape.rows, shape.segments
        sizes = [rows] * 4 + [1 + min(rows, adapter_slots)]
        if segments:
            sizes += [segments + 1, segments, segments, segments, shape.tiles, shape.tiles, segments, segments]
        if next_ids:
            sizes.append(rows)
        ends = list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes))
        self.places = [slice(begin, begin + size) for begin, size in zip([0, *ends], sizes, strict=False)]
        self.words = ends[-1]


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """A step whose integers are on their way to the device."""

    rows: StepRows
    has_adapters: bool
    logit_rows: Tensor | None
    """[R] int32 rows of the batch whose logits are sampled; None: the first ``num_logits``."""
    num_logits: int
    table_entries: Tensor
    """[n, 2] int32, for write_tables()."""
    copies_before: Tensor
    """[n, 2] int32, for DeviceCache.copy_states()."""
    copies_after: Tensor
    block_copies: Tensor
    """[n, 2] int32, for DeviceCache.copy_blocks()."""
    extra: Tensor
    """Words that the caller added, int32; they begin at a multiple of 16 bytes."""


class StepBuffers:
    """Fills steps. Used by one thread.

    Args:
        capacity: words: of the largest step and everything beside it.
        depth: steps that may be in flight.
        adapter_slots: LoRA slots, the base's included.
        next_ids: steps have the token behind each row, for the mtp layer.
    """

    def __init__(
        self, stream: EngineStream, *, capacity: int, depth: int, adapter_slots: int, next_ids: bool = False
    ) -> None:
        self._stream = stream
        self._next_ids = next_ids
        self._adapter_slots = adapter_slots
        self._device = torch.zeros(capacity, dtype=torch.int32, device=stream.device)
        self._hosts = [stream.host_buffer(capacity) for _ in range(depth)]
        self._copied = [Arrival(None) for _ in range(depth)]
        self._turn = 0
        self._kept: dict[StepShape, tuple[_Sections, StepRows]] = {}

    @staticmethod
    def words(shape: StepShape, adapter_slots: int) -> int:
        """Size of a step without what varies."""
        return _Sections(shape, adapter_slots, next_ids=True).words

    def keep(self, shape: StepShape) -> StepRows:
        """The views of a shape, built once: what a graph of the shape is captured with."""
        if shape not in self._kept:
            self._kept[shape] = self._placed(shape)
        return self._kept[shape][1]

    def load(
        self,
        shape: StepShape,
        chunks: Sequence[Chunk],
        decodes: int,
        *,
        entries: TableEntries | None = None,
        copies_before: Sequence[StateCopy] = (),
        copies_after: Sequence[StateCopy] = (),
        block_copies: Sequence[BlockCopy] = (),
        extra: Words | None = None,
    ) -> LoadedStep:
        """Writes a step and queues its copy to the device.

        Args:
            shape: holds the chunks.
            chunks: the first ``decodes`` of them are decodes, of at most ``shape.group`` rows.
            entries: new entries of the block tables.
            extra: int32 words that the caller wants on the device with the step.
        """
        sections, rows = self._kept.get(shape) or self._placed(shape)
        host = self._next_host()
        adapters = _fill(host, sections, shape, chunks, decodes)
        if self._next_ids:
            _fill_next(host[sections.places[-1]], chunks, decodes, shape.decodes)

        end = sections.words
        parts: list[tuple[int, int]] = []
        prefills = len(chunks) > decodes
        sampled = sampled_rows(chunks, decodes, shape)
        logits: Words = np.array(sampled if prefills else (), dtype=np.int32)
        pairs = [_pairs(copies) for copies in (copies_before, copies_after, block_copies)]
        for words in (logits, *pairs, entries, extra):
            size = 0 if words is None else words.size
            if words is not None:
                host[end : end + size] = words.reshape(-1)
            parts.append((end, end + size))
            end += -(-size // _ALIGN) * _ALIGN
        self._send(end)

        tails = [self._device[begin:stop] for begin, stop in parts]
        return LoadedStep(
            rows=rows,
            has_adapters=adapters,
            logit_rows=tails[0] if prefills else None,
            num_logits=len(sampled),
            table_entries=tails[4].view(-1, 2),
            copies_before=tails[1].view(-1, 2),
            copies_after=tails[2].view(-1, 2),
            block_copies=tails[3].view(-1, 2),
            extra=tails[5],
        )

    def send_entries(self, entries: TableEntries) -> Tensor:
        """Queues the copy of table entries that are too many for one step; [n, 2] int32 on the device."""
        self._next_host()[: entries.size] = entries.reshape(-1)
        self._send(entries.size)
        return self._device[: entries.size].view(-1, 2)

    def _next_host(self) -> Words:
        """The host buffer whose turn it is. Its last copy was ``depth`` steps ago, so the wait is none in practice."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._copied[self._turn].wait()
        words: Words = self._hosts[self._turn].numpy()
        return words

    def _send(self, words: int) -> None:
        self._device[:words].copy_(self._hosts[self._turn][:words], non_blocking=True)
        self._copied[self._turn] = self._stream.mark()

    def _placed(self, shape: StepShape) -> tuple[_Sections, StepRows]:
        sections = _Sections(shape, self._adapter_slots, self._next_ids)
        parts = [self._device[place] for place in sections.places]
        segments = None
        if shape.segments:
            segments = Segments(
                begin=parts[5],
                start=parts[6],
                slot=parts[7],
                adapter=parts[8],
                tile_segment=parts[9],
                tile_row=parts[10],
                out_slot=parts[11],
                links=parts[12],
                chains=shape.chains,
            )
        return sections, StepRows(
            tokens=parts[0],
            positions=parts[1],
            slots=parts[2],
            adapters=parts[3],
            active_adapters=parts[4],
            decodes=shape.decodes,
            segments=segments,
            group=shape.group,
            next_ids=parts[-1] if self._next_ids else None,
        )


def _pairs(copies: Sequence[StateCopy] | Sequence[BlockCopy]) -> Words:
    return np.array([(copy.source, copy.target) for copy in copies], dtype=np.int32)


def sampled_rows(chunks: Sequence[Chunk], decodes: int, shape: StepShape) -> list[int]:
    """Rows of the batch that are sampled: all of the decodes' groups, then those of the other chunks."""
    rows = list(range(decodes * shape.group))
    end = shape.decodes
    for chunk in chunks[decodes:]:
        end += len(chunk.token_ids)
        if chunk.samples:
            rows.append(end - 1)
    return rows


def _fill_next(next_ids: Words, chunks: Sequence[Chunk], decodes: int, first_row: int) -> None:
    """The token behind each row; whatever, where the step samples it."""
    next_ids[:first_row] = 0
    at = first_row
    for chunk in chunks[decodes:]:
        end = at + len(chunk.token_ids)
        next_ids[at : end - 1] = chunk.token_ids[1:]
        next_ids[end - 1] = max(chunk.next_id, 0)
        at = end
    next_ids[at:] = 0


def _fill(host: Words, sections: _Sections, shape: StepShape, chunks: Sequence[Chunk], decodes: int) -> bool:
    """Writes rows and segments; everything beyond the chunks becomes padding. Returns whether a row has an adapter."""
    tokens, positions, slots, adapters, active = (host[place] for place in sections.places[:5])
    running, group = chunks[:decodes], shape.group
    end = decodes * group
    if group > 1:
        _fill_groups(host, sections, running, group)
    else:
        tokens[:end] = [chunk.token_ids[0] for chunk in running]
        positions[:end] = [chunk.start for chunk in running]
        slots[:end] = [chunk.slot for chunk in running]
        adapters[:end] = [chunk.request.pin.slot for chunk in running]
    for column in (tokens, positions, slots, adapters):
        column[end : shape.decodes] = 0
    distinct = {chunk.request.pin.slot for chunk in chunks} - {0}
    active[0] = len(distinct)
    active[1 : 1 + len(distinct)] = sorted(distinct)
    if not shape.segments:
        return bool(distinct)

    begin, start, slot, adapter, tile_segment, tile_row, out_slot, chain = (
        host[place] for place in sections.places[5:13]
    )
    prefills = split_at_snapshots(chunks[decodes:])
    count = len(prefills)
    at, tile = shape.decodes, 0
    for index, chunk in enumerate(prefills):
        length = len(chunk.token_ids)
        end = at + length
        begin[index] = at
        tokens[at:end] = chunk.token_ids
        positions[at:end] = np.arange(chunk.start, chunk.start + length, dtype=np.int32)
        slots[at:end] = chunk.slot
        adapters[at:end] = chunk.request.pin.slot
        tiles = -(-length // TILE)
        tile_segment[tile : tile + tiles] = index
        tile_row[tile : tile + tiles] = np.arange(at, end, TILE, dtype=np.int32)
        at, tile = end, tile + tiles
    start[:count] = [chunk.start for chunk in prefills]
    slot[:count] = [chunk.slot for chunk in prefills]
    adapter[:count] = [chunk.request.pin.slot for chunk in prefills]
    out_slot[:count] = [chunk.out_slot or chunk.slot for chunk in prefills]
    _fill_chains(chain, chunks[decodes:])
    for column in (tokens, positions, slots, adapters):
        column[at:] = 0
    for column in (start, slot, adapter, out_slot):
        column[count:] = 0
    begin[count:] = at
    tile_segment[tile:] = -1
    tile_row[tile:] = at
    return bool(distinct)


def _fill_groups(host: Words, sections: _Sections, chunks: Sequence[Chunk], group: int) -> None:
    """Rows of decodes with draft tokens; slot 0 where a group has more rows than its chunk tokens."""
    end = len(chunks) * group
    tokens, positions, slots, adapters = (host[place][:end].reshape(-1, group) for place in sections.places[:4])
    lengths = np.array([len(chunk.token_ids) for chunk in chunks])[:, None]
    held = np.arange(group) < lengths
    tokens[held] = [token for chunk in chunks for token in chunk.token_ids]
    tokens[~held] = 0
    positions[:] = np.array([chunk.start for chunk in chunks])[:, None] + np.arange(group)
    slots[:] = np.where(held, np.array([chunk.slot for chunk in chunks])[:, None], 0)
    adapters[:] = np.array([chunk.request.pin.slot for chunk in chunks])[:, None]


def _fill_chains(column: Words, chunks: Sequence[Chunk]) -> None:
    """Writes for each segment how many begin a chain with it (see Segments.links)."""
    column[:] = 0
    at = 0
    for chunk in chunks:
        column[at] = count = 1 + len(chunk.snapshots)
        at += count
