"""Turns a StepPlan into a few launches and, later, the result: the engine's runner on a CUDA device.

A step is one copy of integers to the device, its layers (a captured graph, or uncaptured kernels for shapes that none
holds), the head and the sampler, one small copy back and an event. ``launch`` never waits for the device; the loop
launches the next step while this one runs and asks for its result after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch
from torch import Tensor

from kernels.gpu.attention.decode import DecodeWorkspace, decode_splits
from kernels.gpu.copies.block_tables import write_tables
from kernels.gpu.launch.trusted_constants import trust_constants
from kernels.gpu.sampling.sample import ROW_WORDS
from kernels.gpu.segments import TILE
from services.common.telemetry.stopwatch import Stopwatch
from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.executors.cuda.block_tables import TableEntries, TableShadow
from services.engine.executors.cuda.buffers import StepBuffers, StepShape, sampled_rows
from services.engine.executors.cuda.compile_ahead import compile_ahead, compiled_here
from services.engine.executors.cuda.graphs import StepGraphs, StepOutput
from services.engine.executors.cuda.launched_steps import LaunchedStep, OpenedStep, QueuedStep
from services.engine.executors.cuda.mtp import DraftRows, fill_next_ids, sample_draft_tokens
from services.engine.executors.cuda.prompt_scoring import CudaPromptReader
from services.engine.executors.cuda.sampling.mask_upload import MaskUpload
from services.engine.executors.cuda.sampling.sampler import CudaSampler
from services.engine.executors.cuda.shapes import attention_buckets, captured_shapes, decode_bucket
from services.engine.executors.cuda.stream import EngineStream
from services.engine.executors.cuda.warm_up import masks_to_try, sampling_plans, warm_up_shapes
from services.engine.executors.runner import OpenStep, StepHandle
from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
from services.engine.models.interface import CausalLM, DeviceForward
from services.engine.models.lora.slots import LoraSlots
from services.engine.scheduler.step_plan import Chunk, StepPlan, StepResult, split_at_snapshots

log = structlog.get_logger(__name__)

_INVARIANT_BATCH = 64
"""Decode attention is cut as for this batch size, or a larger one, where a row's bits must not depend on the batch."""
_CAPTURED_HEAD = 8
"""Most rows of a decode whose head is captured behind its layers: the host takes as long to launch a head as a small
model's step has, and each captured step keeps the logits of its rows."""
_ENTRIES_A_COPY = 16384
"""New block table entries that travel with a step; more (many long cached prefixes at once) go ahead of it."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Limits of a step, which the runner's static buffers must hold."""

    max_num_seqs: int
    token_budget: int
    max_model_len: int
    largest_graph: int = 0
    """Largest decode batch to capture as a CUDA graph; 0: capture nothing."""
    mixed_tokens: int = 0
    """Prefill tokens of a step that also decodes, to capture; 0: capture none."""
    speculative: bool = False
    """Draft a token for the next step of each request; the model and the cache have its mtp layer."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options for launching kernels."""

    batch_invariant: bool = False
    """A row's bits do not depend on the other rows of its step (matrices and adapters must be made so too)."""
    pdl: bool = False
    """Kernels are launched before the ones ahead have finished (programmatic dependent launch)."""


class CudaRunner:
    """Runs steps on one stream. Used by the loop thread only, once ``warm_up`` has returned.

    Args:
        model: its weights are matrices that project (services.engine.models.weights.matrix).
        cache: the scheduler owns which blocks and slots mean what.
        lora: stacked adapter slots; slot 0 is the base.
        eos_token_ids: what min_tokens masks.

    With speculation one step is in flight at a time: where the next one starts depends on what this one accepts.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: DeviceCache,
        lora: LoraSlots,
        limits: RunnerLimits,
        options: RunnerOptions = RunnerOptions(),
        *,
        eos_token_ids: Sequence[int],
    ) -> None:
        if limits.speculative and cache.waiting is not None:
            raise ValueError("speculation reads states as they are: nothing of them may wait (waiting_writes=0)")
        device, config = model.device, model.config
        self._limits = limits
        self._vocab = config.vocab_size
        self.depth = 1 if limits.speculative else 2
        sampled = limits.max_num_seqs * (2 if limits.speculative else 1)
        self._cache = cache
        self._lora = lora
        self._has_adapters = lora.num_slots > 1
        self._stream = EngineStream(device)
        max_blocks = -(-limits.max_model_len // cache.block_size)
        self._tables = torch.zeros(cache.num_slots, -(-max_blocks // 4) * 4, dtype=torch.int32, device=device)
        self._shadow = TableShadow(cache.num_slots, self._tables.shape[1])
        self._sampler = CudaSampler(eos_token_ids, cache.num_slots, config.vocab_size, sampled, device, pdl=options.pdl)
        self._reader = CudaPromptReader(self._stream, config.vocab_size, limits.max_num_seqs)
        self._masks = MaskUpload(self._stream, sampled, config.vocab_size)
        # With speculation the second is for the draft tokens.
        self._results = [self._stream.host_buffer(sampled * ROW_WORDS) for _ in range(2)]
        self._turn = 0
        self._shapes = captured_shapes(
            limits.largest_graph,
            limits.max_num_seqs,
            limits.token_budget,
            limits.mixed_tokens,
            speculative=limits.speculative,
        )
        self._attention = _attention(model, cache, limits, options)
        self.forward = model.device_forward(
            cache,
            lora,
            tables=self._tables,
            last_tokens=self._sampler.last_tokens,
            batch_invariant=options.batch_invariant,
            pdl=options.pdl,
        )
        adapter_slots = lora.num_slots - 1
        segments = limits.max_num_seqs + cache.num_slots  # a snapshot each slot, at most
        largest = StepShape(
            limits.max_num_seqs,
            limits.max_num_seqs + limits.token_budget,
            segments,
            limits.token_budget // TILE + segments,
        )
        words = max(StepBuffers.words(shape, adapter_slots) for shape in (*self._shapes, largest))
        extra = 32 * limits.max_num_seqs + 4 * cache.num_slots + 2 * _ENTRIES_A_COPY
        self._buffers = StepBuffers(
            self._stream,
            capacity=words + extra + 64,
            depth=self.depth,
            adapter_slots=adapter_slots,
            next_ids=limits.speculative,
        )
        self._graphs = StepGraphs(self._stream, self._run_shape)
        self._draft_graphs = StepGraphs(self._stream, self._draft_shape, beside=self._graphs)

    @property
    def captures(self) -> int:
        """CUDA graphs captured since the start: none after warm_up()."""
        return self._graphs.captures + self._draft_graphs.captures

    @property
    def replays(self) -> int:
        """Steps that ran as a CUDA graph."""
        return self._graphs.replays

    @property
    def stream(self) -> EngineStream:
        """Stream that all steps are queued to."""
        return self._stream

    @property
    def decode_sizes(self) -> list[int]:
        """Numbers of rows of the steps of decodes alone that are captured, ascending."""
        return sorted(shape.rows for shape in self._shapes if shape.decodes == shape.rows)

    @property
    def warm_up_shapes(self) -> list[StepShape]:
        """Shapes of this runner's warm-up; see the function of that name."""
        limits = self._limits
        return warm_up_shapes(
            self._shapes,
            limits.max_num_seqs,
            limits.token_budget,
            speculative=limits.speculative,
            rows=self.forward.rows_that_differ,
        )

    def place_decodes(self, rows: int, chunks: Sequence[Chunk]) -> None:
        """Sends decodes for run_decodes(), before requests are served. No chunks: padding, and empty block tables."""
        with self._stream.active():
            if not chunks:
                self._tables.zero_()
                self._shadow.forget()
            step = self._buffers.load(StepShape(rows, rows), chunks, len(chunks), entries=self._entries(chunks))
            write_tables(self._tables, step.table_entries)

    @torch.inference_mode()
    def run_decodes(self, rows: int, forward: DeviceForward, *, adapters: bool) -> Tensor:
        """Launches layers and head of the decodes that were placed; logits [rows, vocab]. Can be captured."""
        x = self._layers(self._buffers.keep(StepShape(rows, rows)), forward, adapters)
        return forward.logits(x[: self._limits.max_num_seqs])

    @torch.inference_mode()
    def warm_up(self, compilers: Executor | None = None) -> None:
        """Compiles every kernel, reserves the memory of the largest step and captures the graphs. Before the first
        request: what it leaves in the caches means nothing.

        Args:
            compilers: a CompilerPool to compile on; None: a pool for this call, if anything is not compiled yet.
        """
        trust_constants()
        watch, shapes = Stopwatch(), self.warm_up_shapes
        # Each kernel once is enough to load it, and a few layers need as much memory as all: nothing of a layer stays.
        few = self.forward.one_of_each_layer()
        with self._stream.active():
            compiled = compile_ahead(lambda: self._launch_all(shapes, few), compilers)
            log.info("kernels compiled", kernels=compiled, seconds=watch.lap())
            with compiled_here() as late:
                self._launch_all(shapes, few)
                for shape in (shapes[0], shapes[-1]):
                    self._run_padding(shape, self.forward)
        if late:
            log.warning("kernels were not compiled ahead", kernels=sorted(set(late)), count=len(late))
        self._stream.synchronize()
        log.info("kernels loaded", seconds=watch.lap())
        if self._shapes:
            self._graphs.capture(self._shapes, adapters=self._has_adapters)
            if self._limits.speculative:
                self._draft_graphs.capture(self._shapes, adapters=self._has_adapters)
        self._stream.synchronize()

    def _launch_all(self, shapes: Sequence[StepShape], forward: DeviceForward) -> None:
        if self._has_adapters:
            self._lora.warm_up()
        scratch = torch.zeros(1, 2, dtype=torch.int32, device=self._stream.device)
        self._cache.copy_blocks(scratch)
        self._cache.copy_states(scratch)
        for shape in shapes:
            self._run_padding(shape, forward)
        for plan in sampling_plans(self._limits.max_num_seqs):
            for masks in masks_to_try(plan, self._vocab):
                self._sample(self._queue(plan, forward), masks).result()

    def _run_padding(self, shape: StepShape, forward: DeviceForward) -> None:
        rows = self._buffers.load(shape, (), 0).rows
        x = self._layers(rows, forward, adapters=False)
        if self._has_adapters:
            x = self._layers(rows, forward, adapters=True)
        forward.logits(x[: self._limits.max_num_seqs])
        self._reader.warm_up(forward, x)
        if self._limits.speculative:
            forward.draft_logits(self._draft(x, rows, forward)[: self._limits.max_num_seqs])

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queues a step behind those in flight."""
        return self._sample_now(self._queue_now(plan), NO_MASKS)

    @torch.inference_mode()
    def open(self, plan: StepPlan) -> OpenStep:
        """Queues a step behind those in flight, up to its logits."""
        queued = self._queue_now(plan)
        return OpenedStep(lambda masks: self._sample_now(queued, masks))

    def _launch(self, plan: StepPlan, forward: DeviceForward) -> LaunchedStep:
        """A step whose rows may take any token, on the current stream."""
        return self._sample(self._queue(plan, forward), NO_MASKS)

    def _queue_now(self, plan: StepPlan) -> QueuedStep:
        try:
            with self._stream.active():
                return self._queue(plan, self.forward)
        except BaseException:
            # What was to be sent may not have reached the device.
            self._shadow.forget()
            raise

    @torch.inference_mode()
    def _sample_now(self, queued: QueuedStep, masks: RowMasks) -> LaunchedStep:
        with self._stream.active():
            return self._sample(queued, masks)

    def _queue(self, plan: StepPlan, forward: DeviceForward) -> QueuedStep:
        chunks = plan.chunks
        decodes = 0
        while decodes < len(chunks) and chunks[decodes].is_decode:
            decodes += 1
        short = self._limits.speculative and decodes < len(chunks)
        short = short and all(chunk.verifies for chunk in chunks[decodes:])
        if short:  # decodes are segments of one row among those of a few
            decodes = 0
        prefills = chunks[decodes:]
        lengths = [len(link.token_ids) for link in split_at_snapshots(prefills)]
        wanted = StepShape.of(decodes, lengths, short=short, chains=len(prefills))
        captured = self._graphs.find(wanted)
        entries = self._entries(chunks)
        sampled = [row for chunk in chunks for row in chunk.rows]
        sampling = self._sampler.prepare(sampled)
        extra = sampling.step
        drafting: DraftRows | None = None
        if self._limits.speculative and any(chunk.request.sampling.draftable for chunk in chunks):
            drafting = DraftRows.of(chunks, sampled_rows(chunks, decodes, (captured or wanted).decodes))
            extra = np.concatenate((extra.reshape(-1), drafting.words.reshape(-1)))
        step = self._buffers.load(
            captured or wanted,
            chunks,
            decodes,
            entries=entries,
            copies_before=plan.copies_before,
            copies_after=plan.copies_after,
            block_copies=plan.block_copies,
            extra=extra,
        )
        write_tables(self._tables, step.table_entries)
        self._cache.copy_blocks(step.block_copies)
        self._cache.copy_states(step.copies_before)
        out = (
            self._graphs.replay(captured, step.has_adapters)
            if captured
            else StepOutput(self._layers(step.rows, forward, step.has_adapters))
        )
        x = out.x
        self._cache.copy_states(step.copies_after)
        reports = None
        if plan.reads:
            reports = self._reader.launch(forward, x, plan, decodes, (captured or wanted).decodes)
        logits = None
        if sampled and out.logits is not None:
            logits = out.logits[: step.num_logits]
        elif sampled:
            chosen = x[: step.num_logits] if step.logit_rows is None else x.index_select(0, step.logit_rows)
            logits = forward.logits(chosen)
        samples = sum(chunk.samples for chunk in chunks)
        return QueuedStep(forward, step, captured, x, logits, sampling, drafting, samples, reports)

    def _entries(self, chunks: Sequence[Chunk]) -> TableEntries:
        """New entries of the block tables that go with a step; what is too much for one copy has been sent."""
        entries = self._shadow.entries(chunks)
        while len(entries) > _ENTRIES_A_COPY:
            write_tables(self._tables, self._buffers.send_entries(entries[:_ENTRIES_A_COPY]))
            entries = entries[_ENTRIES_A_COPY:]
        return entries

    def _sample(self, queued: QueuedStep, masks: RowMasks) -> LaunchedStep:
        """Queues the sampling of a step, and its draft tokens."""
        words, reports = None, queued.reports
        if queued.logits is not None:
            sampling = queued.sampling
            step = queued.step.extra[: sampling.step.size].view(3, -1)
            words = self._sampler.launch(queued.logits, sampling, step, self._masks.send(masks)).words
        if queued.drafting is not None:
            return replace(self._launch_draft_tokens(queued, words, queued.drafting), reports=reports)
        if words is None:
            return LaunchedStep(self._stream.mark(), None, reports)
        host = self._fetch(words)
        # Requests whose logits are edited or tokens given only: nothing is drafted.
        none = [-1] * queued.samples if self._limits.speculative else ()
        return LaunchedStep(self._stream.mark(), lambda: StepResult(self._sampler.read(host), none), reports)

    def _launch_draft_tokens(self, queued: QueuedStep, words: Tensor | None, drafting: DraftRows) -> LaunchedStep:
        """The mtp layer over all rows of a step, and a draft token for each request whose token it sampled.

        Args:
            words: what the sampler left; None: nothing was sampled.
        """
        step, forward, sampling, captured = queued.step, queued.forward, queued.sampling, queued.captured
        if words is not None and step.rows.next_ids is not None:
            fill_next_ids(step.rows.next_ids, step.logit_rows, words[:, 0])
        replay = self._draft_graphs.replay
        out = replay(captured, step.has_adapters).x if captured else self._draft(queued.x, step.rows, forward)
        if words is None:
            return LaunchedStep(self._stream.mark(), None)
        host = self._fetch(words)
        if not drafting.places:
            drafts = drafting.read(())
            return LaunchedStep(self._stream.mark(), lambda: StepResult(self._sampler.read(host), drafts))
        tail = step.extra[sampling.step.size :].view(drafting.words.shape)
        drawn = self._fetch(sample_draft_tokens(forward, self._sampler, out, tail, words[:, 0], sampling).words)
        return LaunchedStep(
            self._stream.mark(),
            lambda: StepResult(self._sampler.read(host), drafting.read(self._sampler.read(drawn))),
        )

    def _fetch(self, words: Tensor) -> Tensor:
        """Queues the copy of results to the host."""
        self._turn = (self._turn + 1) % len(self._results)
        host = self._results[self._turn][: words.numel()].view(words.shape)
        host.copy_(words, non_blocking=True)
        return host

    def _run_shape(self, shape: StepShape, adapters: bool) -> StepOutput:
        x = self._layers(self._buffers.keep(shape), self.forward, adapters)
        if shape.decodes < shape.rows or shape.rows > _CAPTURED_HEAD:
            return StepOutput(x)
        return StepOutput(x, self.forward.logits(x[: self._limits.max_num_seqs]))

    def _draft_shape(self, shape: StepShape, adapters: bool) -> StepOutput:
        return StepOutput(self._draft(self._graphs.output(shape, adapters).x, self._buffers.keep(shape), self.forward))

    def _layers(self, rows: StepRows, forward: DeviceForward, adapters: bool) -> Tensor:
        return forward.layers(rows, self._attention_of(rows), adapters=adapters)

    def _draft(self, x: Tensor, rows: StepRows, forward: DeviceForward) -> Tensor:
        return forward.draft(x, rows, self._attention_of(rows))

    def _attention_of(self, rows: StepRows) -> DecodeAttention | None:
        count = rows.tokens.shape[0] if rows.short else rows.decodes
        return self._attention[decode_bucket(count)] if count else None


def _attention(
    model: CausalLM, cache: DeviceCache, limits: RunnerLimits, options: RunnerOptions
) -> dict[int, DecodeAttention]:
    """Decode attention by batch bucket. Buckets with as many splits share a workspace."""
    config, device, kernels = model.config, model.device, model.kernel_configs()
    buckets = attention_buckets(limits.max_num_seqs, speculative=limits.speculative)
    # An invariant row is cut as in a large batch whatever batch it is in.
    alike = max(buckets[-1], _INVARIANT_BATCH)
    splits = {
        bucket: decode_splits(alike if options.batch_invariant else bucket, config.num_kv_heads, kernels.device)
        for bucket in buckets
    }
    workspaces = {
        count: DecodeWorkspace.allocate(
            max(bucket for bucket in buckets if splits[bucket] == count),
            config.num_heads,
            config.num_kv_heads,
            count,
            config.head_dim,
            device,
        )
        for count in set(splits.values())
    }
    chosen = kernels.decode(cache.pages[0], alike) if options.batch_invariant and cache.pages else None
    return {bucket: DecodeAttention(splits[bucket], workspaces[splits[bucket]], chosen) for bucket in buckets}
