"""Speculation on a CUDA device: which tokens of a step count and which draft tokens follow, decided there.

The plain twin is services/engine/executors/cpu/speculation.py, the kernels are in kernels/gpu/sampling/draft_tokens.py.
The runner tells a step's rows apart by groups: a decode has as many rows as any chunk of the step has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.delta.conv_verify import move_windows
from kernels.gpu.delta.verify import cut_spans
from kernels.gpu.sampling.draft_blocks import Block, place_block, take_block
from kernels.gpu.sampling.draft_tokens import (
    ACCEPTED_SHIFT,
    CHUNK_WORDS,
    COUNTED,
    MOST,
    ROWS_WORD,
    Chain,
    SlotTokens,
    accept,
    next_draft,
    place_rows,
)
from kernels.gpu.sampling.sample import MaskTensors
from services.engine.constraints.masks import RowMasks
from services.engine.executors.cuda.buffers import LoadedStep, StepShape
from services.engine.executors.cuda.graphs import StepGraphs, StepOutput
from services.engine.executors.cuda.sampling.sampler import CudaSampler, SampleRows
from services.engine.executors.cuda.shapes import decode_bucket, decode_buckets, draft_buckets, draft_counts
from services.engine.executors.cuda.stream import Arrival, EngineStream
from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
from services.engine.models.interface import DeviceForward
from services.engine.scheduler.step_plan import PENDING, Chunk, StepResult

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SampledChunks:
    """Chunks of a step that sample."""

    words: Words
    """[C, CHUNK_WORDS], of accept(); padded to a decode_bucket()."""
    firsts: Sequence[int]
    """Place of each chunk's first row among those that the sampler has."""
    places: Sequence[int]
    """Place of each sampled row of the plan."""
    group: int
    """Rows of a decode."""
    decodes: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], decodes: int, shape: StepShape, block_size: int) -> SampledChunks:
        """Chunks of a step; the first ``decodes`` are decodes, with ``shape.group`` rows each."""
        group, end, place = shape.group, shape.decodes, decodes * shape.group
        rows = [
            (chunk.slot, at, at, chunk.sampled_rows, len(chunk.blocks) * block_size, chunk.token_ids[0] == PENDING)
            for at, chunk in zip(range(0, place, group), chunks[:decodes], strict=True)
        ]
        for chunk in chunks[decodes:]:
            end += len(chunk.token_ids)
            if chunk.samples:
                rows.append((chunk.slot, end - 1, place, 1, len(chunk.blocks) * block_size, False))
                place += 1
        words = np.zeros((decode_bucket(len(rows)), CHUNK_WORDS), dtype=np.int32)
        if rows:
            words[: len(rows), : len(rows[0])] = rows
        firsts = [row[2] for row in rows]
        places = [first + index for first, row in zip(firsts, rows, strict=True) for index in range(row[3])]
        return cls(words, firsts, places, group, decodes)

    def masks(self, masks: RowMasks) -> RowMasks:
        """Masks of the plan's sampled rows as those of the sampler's."""
        places = self.places
        return RowMasks([places[row] for row in masks.rows], masks.bits, [places[row] for row in masks.unwanted])


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Tokens of a step's decodes on their way to the host, which makes masks for the rows behind draft tokens."""

    chunks: SampledChunks
    tokens: Tensor
    """[decodes · group] int32 on the host; empty without draft tokens."""
    arrival: Arrival

    def drafts(self) -> list[list[int]]:
        """Draft tokens of each chunk that samples, once they are there."""
        self.arrival.wait()
        tokens, counts = self.tokens.tolist(), self.chunks.words[:, ROWS_WORD].tolist()
        return [tokens[first + 1 : first + count] for first, count in zip(self.chunks.firsts, counts, strict=False)]


class _Drafting:
    """Buffers at fixed addresses from which draft tokens are drawn for so many chunks."""

    def __init__(self, chunks: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.chain = Chain.allocate(chunks, device)
        self.hidden = torch.zeros(chunks, hidden, dtype=dtype, device=device)
        """[C, hidden]: outputs of the mtp layer behind which the next draft tokens are drawn."""
        chain = self.chain
        self.rows = StepRows(
            tokens=chain.next_ids,
            positions=chain.positions,
            slots=chain.slots,
            adapters=chain.no_adapters,
            active_adapters=torch.zeros(1, dtype=torch.int32, device=device),
            decodes=chunks,
            segments=None,
            next_ids=chain.next_ids,
        )


class _DraftingAtOnce:
    """The same for the draft tokens of a block drafter.

    Args:
        chain: of as many chunks.
    """

    def __init__(self, chain: Chain, count: int, hidden: int, dtype: torch.dtype) -> None:
        chunks, device = len(chain.slots), chain.slots.device
        self.block = Block.allocate(chunks, count, device)
        self.hidden = torch.zeros(chunks, count, hidden, dtype=dtype, device=device)
        """[C, count, hidden]: outputs of the drafter behind which the draft tokens are drawn."""
        rows = chunks * (count - 1)
        nothing = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rows: StepRows | None = None
        """Behind the first one of each chunk; None: there are none."""
        if rows:
            self.rows = StepRows(
                tokens=nothing,
                positions=self.block.positions,
                slots=self.block.slots,
                adapters=nothing,
                active_adapters=torch.zeros(1, dtype=torch.int32, device=device),
                decodes=rows,
                segments=None,
                group=count - 1,
            )


class CudaSpeculation:
    """Slots' tokens on the device, and the kernels around a step that read and write them. Used by the loop thread
    only, on the runner's stream.

    Args:
        forward: of the runner.
        attention: of a decode batch, by its number of rows.
        max_num_seqs: most chunks that sample.
        draft_tokens: most of a chunk.
        at_once: a block drafter draws them.
        graphs: of the runner, whose memory those of drafting share.
    """

    def __init__(
        self,
        forward: DeviceForward,
        sampler: CudaSampler,
        cache: DeviceCache,
        stream: EngineStream,
        attention: Callable[[int], DecodeAttention],
        *,
        hidden: int,
        max_num_seqs: int,
        draft_tokens: int,
        at_once: bool,
        graphs: StepGraphs,
    ) -> None:
        if cache.waiting is None or cache.verified is None:
            raise ValueError("speculation needs a cache with waiting writes and verified rows")
        if draft_tokens >= min(1 + MOST, 1 + cache.waiting.room) or (draft_tokens > COUNTED and not at_once):
            raise ValueError(f"{draft_tokens} draft tokens beside states with room for {cache.waiting.room} writes")
        self._forward, self._sampler, self._cache = forward, sampler, cache
        self._attention = attention
        self._waiting, self._verified = cache.waiting, cache.verified
        self._slots = SlotTokens.allocate(sampler.last_tokens)
        most = decode_bucket(max_num_seqs)
        self._rejected = torch.zeros(most, dtype=torch.int32, device=stream.device)
        self.drafted = torch.full((sampler.max_rows, COUNTED), -1, dtype=torch.int32, device=stream.device)
        """[R, COUNTED] int32: draft tokens that each sampled row of the step follows, for the sampler."""
        self._drafting = {
            size: _Drafting(size, hidden, cache.conv.dtype, stream.device) for size in decode_buckets(max_num_seqs)
        }
        self._most = draft_tokens
        self._at_once = {
            (size, count): _DraftingAtOnce(self._drafting[size].chain, count, hidden, cache.conv.dtype)
            for size in draft_buckets(max_num_seqs)
            for count in draft_counts(draft_tokens)
            if at_once
        }
        """By chunks and draft tokens; {}: they are drawn one behind the other."""
        self._graphs = StepGraphs(stream, self._advance_shape, beside=graphs)
        self._stream = stream
        self._placed = stream.host_buffer(sampler.max_rows)
        self._all_wanted = torch.full((sampler.max_rows,), -1, dtype=torch.int32, device=stream.device)

    @property
    def captures(self) -> int:
        """CUDA graphs captured since the start."""
        return self._graphs.captures

    def place(self, step: LoadedStep, sampling: Tensor, chunks: SampledChunks, *, fetch: bool) -> PlacedRows | None:
        """Queues what fills in the rows of a step's decodes, before its layers.

        Args:
            sampling: [3, R] int32, SampleRows.step on the device.
            fetch: queue the copy of the tokens to the host as well: before it is called again, they must be read.
        """
        rows, placed = step.rows, chunks.decodes * chunks.group
        place_rows(
            rows.tokens,
            rows.positions,
            rows.slots,
            sampling,
            self.drafted,
            self._slots,
            chunks.decodes,
            chunks.group,
            sampling.shape[1] - placed,
        )
        if not fetch:
            return None
        host = self._placed[: placed if chunks.group > 1 else 0]
        host.copy_(rows.tokens[: len(host)], non_blocking=True)
        return PlacedRows(chunks, host, self._stream.mark())

    def accept(
        self,
        step: LoadedStep,
        sampling: Tensor,
        words: Tensor,
        chunks: SampledChunks,
        results: Tensor,
        masks: MaskTensors | None,
    ) -> None:
        """Queues what decides which of the sampled tokens count, and moves slots on by them.

        Args:
            words: chunks.words on the device.
            results: [R, ≥ 4] int32, of the sampler.
            masks: that it had.
        """
        rows = step.rows
        if rows.next_ids is None:
            raise ValueError("a step without the tokens behind its rows")
        accept(
            words,
            results,
            sampling,
            rows.tokens,
            rows.positions,
            rows.next_ids,
            self._sampler.parameters,
            self._slots,
            self._sampler.words,
            self._all_wanted if masks is None else masks.rows,
            self._rejected,
            self._drafting[len(words)].chain,
            1 if chunks.group == 1 else 1 + self._most,
        )

    def settle(self, step: LoadedStep, chunks: SampledChunks) -> None:
        """Queues what rolls the states of a step with draft tokens back to the tokens that count."""
        if chunks.group > 1:
            slots = step.rows.slots[: chunks.decodes * chunks.group]
            cut_spans(self._waiting, slots, self._rejected, chunks.group)
            move_windows(self._cache.conv, self._verified, slots, self._rejected, chunks.group)

    def draft(self, out: Tensor, chunks: SampledChunks, sampling: SampleRows, count: int) -> None:
        """Queues the drawing of draft tokens behind a step.

        Args:
            out: [T, hidden], output of the mtp layer for the rows of the step.
            sampling: of the step; draft tokens are drawn with the noise that the tokens themselves will be drawn with.
            count: draft tokens of each chunk, at least 1.
        """
        drawn = replace(sampling, features=replace(sampling.features, alternatives=False))
        size = len(chunks.words)
        buffers = self._drafting[size]
        torch.index_select(out, 0, buffers.chain.rows, out=buffers.hidden)
        if self._at_once:
            self._draw_at_once(buffers.chain, self._at_once[size, count], drawn)
            return
        for number in range(count):
            logits = self._forward.draft_logits(buffers.hidden)
            chain = buffers.chain
            results = self._sampler.launch(logits, drawn, chain.step, drafted=chain.drafted).words
            next_draft(results, self._slots, chain, number)
            if number + 1 < count:
                self._advance(StepShape(size, size))

    def _draw_at_once(self, chain: Chain, drafting: _DraftingAtOnce, drawn: SampleRows) -> None:
        block = drafting.block
        place_block(chain, block)
        self._advance(StepShape.of_groups(len(chain.slots), block.count))
        logits = self._forward.draft_logits(drafting.hidden.flatten(0, 1))
        results = self._sampler.launch(logits, drawn, block.step, drafted=block.drafted).words
        take_block(results, self._slots, chain, block.count)

    def launch_blocks(self) -> None:
        """Launches a block drafter's part of every number of chunks and draft tokens, for chunks that draw nothing."""
        for size, count in self._at_once:
            self._advance_shape(StepShape.of_groups(size, count), adapters=False)

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures the chains of so many chunks each, or the blocks, after they have run."""
        shapes = [StepShape(size, size) for size in sizes]
        if self._at_once:
            shapes = [StepShape.of_groups(size, count) for size, count in self._at_once if size in sizes]
        self._graphs.capture(sorted(shapes, key=lambda shape: -shape.rows), adapters=False)

    def read(self, host: Tensor, chunks: SampledChunks) -> StepResult:
        """Result of a step, from the sampler's results [R, ≥ 4] on the host."""
        tokens, flags = self._sampler.read(host), host[:, 3].tolist()
        accepted = [flags[first] >> ACCEPTED_SHIFT & 15 for first in chunks.firsts]
        return StepResult([tokens[place] for place in chunks.places], accepted)

    def _advance(self, shape: StepShape) -> None:
        if self._graphs.find(shape) == shape:
            self._graphs.replay(shape, adapters=False)
        else:
            self._advance_shape(shape, adapters=False)

    def _advance_shape(self, shape: StepShape, adapters: bool) -> StepOutput:
        """From the outputs of so many chunks to those of the next draft token, or of all of a block: as many as the
        shape has rows of each."""
        del adapters  # they play no part in a drafter
        buffers = self._drafting[shape.rows // shape.group]
        if self._at_once:
            drafting = self._at_once[shape.rows // shape.group, shape.group]
            drafting.hidden[:, 0] = buffers.hidden
            if (rows := drafting.rows) is not None:
                further = self._forward.draft_block(buffers.hidden, rows, self._attention(rows.decodes))
                drafting.hidden[:, 1:] = further.view(len(buffers.hidden), rows.group, -1)
            return StepOutput(drafting.hidden)
        buffers.hidden.copy_(self._forward.draft_on(buffers.hidden, buffers.rows, self._attention(shape.rows)))
        return StepOutput(buffers.hidden)
