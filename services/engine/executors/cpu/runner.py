"""Turns a StepPlan into the buffers of one model step, runs the model and samples.

All integers of a step go to the device in one buffer; the model's tensors are slices of it. Block tables are kept as
rows of one table, by state slot, so that a decode step writes only the blocks that are new.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.executors.cpu.prompt_scoring import read_prompts
from services.engine.executors.cpu.sampler import Sampler
from services.engine.executors.cpu.speculation import CpuSpeculation
from services.engine.executors.runner import CompletedStep
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.requests.outputs import SampledToken
from services.engine.scheduler.step_plan import Chunk, StateCopy, StepPlan, StepResult, segments

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM
    from services.engine.models.lora.slots import LoraSlots


class BlockTables:
    """The block table of every state slot, as rows of one array."""

    def __init__(self, num_slots: int) -> None:
        self._table: npt.NDArray[np.int64] = np.zeros((num_slots, 16), dtype=np.int64)
        self._known: list[list[int]] = [[] for _ in range(num_slots)]

    def rows(self, slots: Sequence[int], blocks: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
        """The tables of some slots, [S, width], padded with block 0.

        Args:
            blocks: the blocks of each slot; what a slot had before is forgotten if it is not a prefix of them.
        """
        if width > self._table.shape[1]:
            grown = np.zeros((len(self._known), max(width, 2 * self._table.shape[1])), dtype=np.int64)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        for slot, wanted in zip(slots, blocks, strict=True):
            self._write(slot, wanted)
        return self._table[slots, :width]

    def _write(self, slot: int, wanted: Sequence[int]) -> None:
        known = self._known[slot]
        count = len(known)
        size = min(len(wanted), self._table.shape[1])
        if count > size or list(wanted[:count]) != known:
            self._table[slot, :count] = 0
            known.clear()
            count = 0
        if count < size:
            fresh = wanted[count:size]
            self._table[slot, count:size] = fresh
            known.extend(fresh)


@dataclass(slots=True)
class UnsampledStep:
    """A step that is computed, but for its sampling."""

    sample: Callable[[RowMasks], StepResult]
    plan: StepPlan
    """With its draft tokens."""
    value: StepResult | None = None

    def drafts(self) -> Sequence[Sequence[int]]:
        return [chunk.drafts for chunk in self.plan.chunks if chunk.samples]

    def seal(self, masks: RowMasks) -> None:
        self.value = self.sample(masks)

    def result(self) -> StepResult:
        if self.value is None:
            raise RuntimeError("the step was not sealed")
        return self.value


class ModelRunner:
    """Runs steps. Used by the loop thread only.

    Args:
        cache: allocated by the model; the scheduler owns which blocks and slots mean what.
        lora: stacked adapter slots; slot 0 is the base.
        num_slots: state slots of the cache.
        eos_token_ids: what min_tokens masks.
        speculative: plans may have draft tokens; the model has its mtp layer.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheBuffers,
        lora: LoraSlots,
        *,
        num_slots: int,
        eos_token_ids: Sequence[int],
        speculative: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._lora = lora
        self._tables = BlockTables(num_slots)
        salt = secrets.randbits(64)
        self._sampler = Sampler(eos_token_ids, model.device, salt)
        self._speculation: CpuSpeculation | None = None
        if speculative:
            same_noise = Sampler(eos_token_ids, model.device, salt)
            self._speculation = CpuSpeculation(model, cache, same_noise, self._batch, eos_token_ids)

    @property
    def depth(self) -> int:
        """A CPU computes in ``launch``: there is nothing to overlap."""
        return 1

    @property
    def costs(self) -> None:
        """Nothing is measured: a CPU checks as many draft tokens as the settings say."""

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(self.execute(plan))

    def open(self, plan: StepPlan) -> UnsampledStep:
        """Computes all chunks; ``seal`` samples."""
        return self._compute(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Computes all chunks and samples one token for each chunk that asks for it."""
        return self._compute(plan).sample(NO_MASKS)

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> UnsampledStep:
        """Computes all chunks."""
        if plan.block_copies:
            sources, targets = zip(*((copy.source, copy.target) for copy in plan.block_copies), strict=True)
            self._model.copy_blocks(self._cache, sources, targets)
        self._copy(plan.copies_before)
        speculation = self._speculation
        if speculation is not None:
            plan = replace(plan, chunks=[speculation.resolved(chunk) for chunk in plan.chunks])
        batch = self._batch(plan.chunks)
        states = self._states(plan.chunks)
        lora = self._lora if batch.has_adapters else None
        if any(chunk.snapshots for chunk in plan.chunks):
            every, step = self._forward_links(batch, plan.chunks)
            hidden = every.index_select(0, batch.logit_rows)
        elif plan.drafts or plan.reads:
            every, step = self._model.forward_all(batch, self._cache, lora)
            hidden = every.index_select(0, batch.logit_rows)
        else:
            hidden = self._model.forward(batch, self._cache, lora)
        self._copy(plan.copies_after)
        rows = [row for chunk in plan.chunks for row in chunk.rows]
        logits = self._model.logits(hidden) if rows else None
        reports = read_prompts(self._model, every, plan) if plan.reads else ()
        if speculation is None:
            return UnsampledStep(lambda masks: StepResult(self._sample(logits, rows, masks), reports=reports), plan)

        def sample(masks: RowMasks) -> StepResult:
            tokens = self._sample(logits, rows, masks)
            accepted = speculation.accepted(plan.chunks, tokens, masks.unwanted)
            with torch.inference_mode():
                self._roll_back(states, plan.chunks, accepted)
                if plan.drafts:
                    speculation.draft(every, step, plan.chunks, tokens, accepted, plan.num_draft_tokens)
            return StepResult(tokens, accepted, reports)

        return UnsampledStep(sample, plan)

    def _states(self, chunks: Sequence[Chunk]) -> Sequence[Sequence[torch.Tensor]]:
        """Copies of the states that chunks with draft tokens continue from; of others nothing."""
        pools = (*self._cache.conv_states, *self._cache.recurrent_states)
        return [[pool[chunk.slot].clone() for pool in pools] if chunk.num_draft_tokens else () for chunk in chunks]

    def _roll_back(
        self, states: Sequence[Sequence[torch.Tensor]], chunks: Sequence[Chunk], accepted: Sequence[int]
    ) -> None:
        """Takes rejected draft tokens out of the states: those of before the step continue with what was accepted."""
        counts = iter(accepted)
        again: list[Chunk] = []
        pools = (*self._cache.conv_states, *self._cache.recurrent_states)
        for chunk, before in zip(chunks, states, strict=True):
            rejected = chunk.sampled_rows - next(counts) if chunk.samples else 0
            if not rejected or chunk.slot == 0:
                continue
            for pool, state in zip(pools, before, strict=True):
                pool[chunk.slot] = state
            kept = chunk.token_ids[: len(chunk.token_ids) - rejected]
            again.append(chunk._replace(token_ids=kept, num_draft_tokens=0))
        if again:
            again.sort(key=lambda chunk: not chunk.is_decode)
            batch = self._batch(again, decodes_again=True)
            self._model.forward(batch, self._cache, self._lora if batch.has_adapters else None)

    def _forward_links(self, batch: ForwardBatch, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, Any]:
        """The model's forward_all() of a batch whose chunks have snapshots: all of them up to their first one, then up
        to their second one, and so on, and the rows put together again."""
        model, cache = self._model, self._cache
        # First, as it clears the states of sequences that start now.
        step = model.begin_step(batch, cache)
        every = torch.empty(len(batch.token_ids), model.config.hidden_size, dtype=model.dtype, device=model.device)
        begins = np.cumsum([0, *batch.lengths])
        chains = [segments(chunk) for chunk in chunks]
        for turn in range(max(map(len, chains))):
            parts: list[Chunk] = []
            rows: list[npt.NDArray[np.int64]] = []
            copies: list[StateCopy] = []
            for chunk, chain, begin in zip(chunks, chains, begins[:-1], strict=True):
                if turn >= len(chain):
                    continue
                link, offset = chain[turn], chain[turn].start - chunk.start
                rows.append(np.arange(begin + offset, begin + offset + len(link.token_ids)))
                if link.out_slot not in (0, chunk.slot):
                    copies.append(StateCopy(chunk.slot, link.out_slot))
                parts.append(link)
            here = self._batch(parts)
            out, _ = model.forward_all(here, cache, self._lora if here.has_adapters else None)
            every.index_copy_(0, torch.from_numpy(np.concatenate(rows)).to(model.device), out)
            self._copy(copies)
        return every, step

    def _sample(self, logits: torch.Tensor | None, rows: Sequence[Chunk], masks: RowMasks) -> list[SampledToken]:
        return [] if logits is None else self._sampler.sample(logits, rows, masks)

    def _copy(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            self._model.copy_state(self._cache, [copy.source for copy in copies], [copy.target for copy in copies])

    def _batch(self, chunks: Sequence[Chunk], *, decodes_again: bool = False) -> ForwardBatch:
        block_size = self._cache.block_size
        starts = [chunk.start for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        slots = [chunk.slot for chunk in chunks]
        adapters = [chunk.request.pin.slot for chunk in chunks]
        decodes = 0
        while decodes < len(chunks) and lengths[decodes] == 1 and starts[decodes] > 0:
            decodes += 1
        total = sum(lengths)
        width = max((start + length - 1) // block_size + 1 for start, length in zip(starts, lengths, strict=True))
        tables = self._tables.rows(slots, [chunk.blocks for chunk in chunks], width)

        sequences = len(chunks)
        ends = np.cumsum(np.array(lengths, dtype=np.int64))
        sampled = np.array([chunk.sampled_rows for chunk in chunks])
        logit_rows = np.repeat(ends, sampled) - 1
        if any(chunk.num_draft_tokens for chunk in chunks):
            logit_rows -= [back for count in sampled for back in range(count - 1, -1, -1)]
        buffer = np.empty(3 * total + 2 * sequences + len(logit_rows) + sequences * width, dtype=np.int64)
        tokens, positions, kv_slots = buffer[: 3 * total].reshape(3, total)
        tokens[:decodes] = [chunk.token_ids[0] for chunk in chunks[:decodes]]
        positions[:decodes] = starts[:decodes]
        rows = np.arange(decodes)
        kv_slots[:decodes] = tables[rows, positions[:decodes] // block_size]
        at = decodes
        for index in range(decodes, sequences):
            end = at + lengths[index]
            tokens[at:end] = chunks[index].token_ids
            positions[at:end] = np.arange(starts[index], starts[index] + lengths[index])
            kv_slots[at:end] = tables[index, positions[at:end] // block_size]
            at = end
        kv_slots *= block_size
        kv_slots += positions % block_size
        rest = 3 * total
        buffer[rest : rest + sequences] = slots
        buffer[rest + sequences : rest + 2 * sequences] = adapters
        rest += 2 * sequences
        buffer[rest : rest + len(logit_rows)] = logit_rows
        buffer[rest + len(logit_rows) :] = tables.reshape(-1)

        tensor = torch.from_numpy(buffer)
        if self._model.device.type == "cuda":
            tensor = tensor.pin_memory().to(self._model.device, non_blocking=True)
        parts = torch.split(tensor, [total] * 3 + [sequences] * 2 + [len(logit_rows), sequences * width])
        return ForwardBatch(
            token_ids=parts[0],
            positions=parts[1],
            kv_slots=parts[2],
            block_tables=parts[6].view(sequences, width),
            state_slots=parts[3],
            adapter_slots=parts[4],
            has_adapters=any(adapters),
            num_decodes=decodes,
            lengths=lengths,
            starts=starts,
            logit_rows=parts[5],
            verifies=decodes_again or any(chunk.num_draft_tokens for chunk in chunks),
        )
