"""Turns a StepPlan into a few launches and, later, the result: the engine's runner on a CUDA device.

A step is one copy of integers to the device, its layers (a captured graph, or uncaptured kernels for shapes that none
holds), the head and the sampler, one small copy back and an event. ``launch`` never waits for the device; the loop
launches the next step while this one runs and asks for its result after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from kernels.gpu.copies.block_tables import write_tables
from kernels.gpu.launch.trusted_constants import trust_constants
from kernels.gpu.sampling.sample import ROW_WORDS
from kernels.gpu.segments import TILE
from services.common.telemetry.stopwatch import Stopwatch
from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.executors.cuda.block_tables import TableEntries, TableShadow
from services.engine.executors.cuda.buffers import LoadedStep, StepBuffers, StepShape
from services.engine.executors.cuda.compile_ahead import compile_ahead, compiled_here
from services.engine.executors.cuda.graphs import StepGraphs, StepOutput
from services.engine.executors.cuda.launched_steps import LaunchedStep, OpenedStep, QueuedStep
from services.engine.executors.cuda.prompt_scoring import CudaPromptReader
from services.engine.executors.cuda.sampling.mask_upload import MaskUpload
from services.engine.executors.cuda.sampling.sampler import CudaSampler, SampleRows
from services.engine.executors.cuda.shapes import (
    captured_shapes,
    decode_attention,
    decode_bucket,
    draft_buckets,
    draft_group,
    most_decode_rows,
)
from services.engine.executors.cuda.speculation import CudaSpeculation, PlacedRows, SampledChunks
from services.engine.executors.cuda.stream import EngineStream
from services.engine.executors.cuda.warm_up import (
    draft_plans,
    masks_to_try,
    measured_costs,
    sampling_plans,
    warm_up_shapes,
)
from services.engine.executors.runner import OpenStep, StepHandle
from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
from services.engine.models.interface import CausalLM, DeviceForward
from services.engine.models.lora.slots import LoraSlots
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import Chunk, StepPlan, StepResult, split_at_snapshots

log = structlog.get_logger(__name__)

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
    draft_tokens: int = 0
    """Most draft tokens of a chunk, drawn for the next steps of requests; the model and the cache have what draws them.
    0: none."""


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
        device, config = model.device, model.config
        self._limits = limits
        self._vocab = config.vocab_size
        self.depth = 2
        self._sampled = sampled = most_decode_rows(limits.max_num_seqs, limits.draft_tokens)
        self._cache = cache
        self._lora = lora
        self._has_adapters, self._stream = lora.num_slots > 1, EngineStream(device)
        max_blocks = -(-limits.max_model_len // cache.block_size)
        self._tables = torch.zeros(cache.num_slots, -(-max_blocks // 4) * 4, dtype=torch.int32, device=device)
        self._shadow = TableShadow(cache.num_slots, self._tables.shape[1])
        drafting = limits.draft_tokens > 0
        self._sampler = CudaSampler(
            eos_token_ids, cache.num_slots, config.vocab_size, sampled, device, pdl=options.pdl, speculative=drafting
        )
        self._reader = CudaPromptReader(self._stream, config.vocab_size, limits.max_num_seqs)
        self._masks = MaskUpload(self._stream, sampled, config.vocab_size)
        self._results = [self._stream.host_buffer(sampled * ROW_WORDS) for _ in range(2)]
        self._turn = 0
        most, invariant = limits.draft_tokens, options.batch_invariant
        self._attention = decode_attention(
            model, cache, limits.max_num_seqs, draft_tokens=most, batch_invariant=invariant
        )
        self.forward = model.device_forward(
            cache,
            lora,
            tables=self._tables,
            last_tokens=self._sampler.last_tokens,
            batch_invariant=invariant,
            pdl=options.pdl,
        )
        self._shapes = captured_shapes(
            limits.largest_graph,
            limits.max_num_seqs,
            limits.token_budget,
            limits.mixed_tokens,
            draft_tokens=most,
            apart=self.forward.prompts_apart,
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
        extra = 32 * sampled + 4 * cache.num_slots + 2 * _ENTRIES_A_COPY
        self._buffers = StepBuffers(
            self._stream,
            capacity=words + extra + 64,
            depth=self.depth,
            adapter_slots=adapter_slots,
            next_ids=drafting,
        )
        self._graphs = StepGraphs(self._stream, self._run_shape)
        self._draft_graphs = StepGraphs(self._stream, self._draft_shape, beside=self._graphs)
        self.costs: StepCosts | None = None
        """See Runner; measured by warm_up()."""
        self._speculation: CudaSpeculation | None = None
        if drafting:
            self._speculation = CudaSpeculation(
                self.forward,
                self._sampler,
                cache,
                self._stream,
                lambda rows: self._attention[decode_bucket(rows)],
                hidden=config.hidden_size,
                max_num_seqs=limits.max_num_seqs,
                draft_tokens=limits.draft_tokens,
                at_once=model.drafter_form is not None and model.drafter_form.block > 0,
                graphs=self._graphs,
            )

    @property
    def captures(self) -> int:
        """CUDA graphs captured since the start: none after warm_up()."""
        drafting = 0 if self._speculation is None else self._speculation.captures
        return self._graphs.captures + self._draft_graphs.captures + drafting

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
        return sorted(shape.rows for shape in self._shapes if shape.decodes == shape.rows and shape.group == 1)

    @property
    def warm_up_shapes(self) -> list[StepShape]:
        """Shapes of this runner's warm-up; see the function of that name."""
        limits = self._limits
        most, differ, apart = limits.draft_tokens, self.forward.rows_that_differ, self.forward.prompts_apart
        return warm_up_shapes(
            self._shapes, limits.max_num_seqs, limits.token_budget, draft_tokens=most, rows=differ, apart=apart
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
        return forward.logits(x[: self._sampled])

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
            if self._speculation is not None:
                self._draft_graphs.capture(self._shapes, adapters=self._has_adapters)
                limits, block_size = self._limits, self._cache.block_size
                sizes = draft_buckets(min(limits.max_num_seqs, limits.largest_graph))
                self._speculation.capture(sizes)
                most, model_len = limits.draft_tokens, limits.max_model_len
                self.costs = measured_costs(self.launch, self._stream, sizes, most, model_len, block_size)
        self._stream.synchronize()

    def _launch_all(self, shapes: Sequence[StepShape], forward: DeviceForward) -> None:
        limits = self._limits
        if self._has_adapters:
            self._lora.warm_up()
        scratch = torch.zeros(1, 2, dtype=torch.int32, device=self._stream.device)
        self._cache.copy_blocks(scratch)
        self._cache.copy_states(scratch)
        for shape in shapes:
            self._run_padding(shape, forward)
        for plan in sampling_plans(limits.max_num_seqs):
            for masks in masks_to_try(plan, self._vocab):
                self._sample(self._queue(plan, forward), masks).result()
        if self._speculation is not None:
            self._speculation.launch_blocks()
            for plan in draft_plans(limits.max_num_seqs, limits.draft_tokens, self._cache.block_size):
                self._launch(plan, forward).result()

    def _run_padding(self, shape: StepShape, forward: DeviceForward) -> None:
        rows = self._buffers.load(shape, (), 0).rows
        x = self._layers(rows, forward, adapters=False)
        if self._has_adapters:
            x = self._layers(rows, forward, adapters=True)
        forward.logits(x[: self._sampled])
        self._reader.warm_up(forward, x)
        if self._limits.draft_tokens:
            forward.draft_logits(self._draft(x, rows, forward)[: self._sampled])

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Queues a step behind those in flight."""
        return self._sample_now(self._queue_now(plan), NO_MASKS)

    @torch.inference_mode()
    def open(self, plan: StepPlan) -> OpenStep:
        """Queues a step behind those in flight, up to its logits."""
        queued = self._queue_now(plan)
        return OpenedStep(lambda masks: self._sample_now(queued, masks), plan, queued.placed)

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
        decodes = plan.num_decodes
        longest = max((len(chunk.token_ids) for chunk in chunks[:decodes]), default=1)
        group = draft_group(longest, self._limits.draft_tokens)
        prefills = chunks[decodes:]
        lengths = [len(link.token_ids) for link in split_at_snapshots(prefills)]
        if group > 1:
            wanted = StepShape.of_groups(decodes, group)
        else:
            wanted = StepShape.of(decodes, lengths, chains=len(prefills))
        captured = self._graphs.find(wanted)
        shape = captured or wanted
        sampling = self._sampler.prepare([chunk for chunk in chunks if chunk.samples], group)
        sampled: SampledChunks | None = None
        placed: PlacedRows | None = None
        extra = sampling.step
        if self._speculation is not None:
            sampled = SampledChunks.of(chunks, decodes, shape, self._cache.block_size)
            extra = np.concatenate((sampled.words.reshape(-1), extra.reshape(-1)))
        step = self._buffers.load(
            shape,
            chunks,
            decodes,
            entries=self._entries(chunks),
            copies_before=plan.copies_before,
            copies_after=plan.copies_after,
            block_copies=plan.block_copies,
            extra=extra,
        )
        write_tables(self._tables, step.table_entries)
        self._cache.copy_blocks(step.block_copies)
        self._cache.copy_states(step.copies_before)
        if self._speculation is not None and sampled is not None:
            placed = self._speculation.place(step, _sampling_words(step, sampling), sampled, fetch=plan.masked)
        if captured:
            out = self._graphs.replay(captured, step.has_adapters)
        else:
            # Launching both parts takes the host longer than all rows together take the device.
            out = StepOutput(self._layers(step.rows, forward, step.has_adapters, apart=not self._shapes))
        x = out.x
        self._cache.copy_states(step.copies_after)
        reports = None
        if plan.reads:
            reports = self._reader.launch(forward, x, plan, decodes, shape.decodes)
        logits = None
        if step.num_logits and out.logits is not None:
            logits = out.logits[: step.num_logits]
        elif step.num_logits:
            chosen = x[: step.num_logits] if step.logit_rows is None else x.index_select(0, step.logit_rows)
            logits = forward.logits(chosen)
        return QueuedStep(
            forward, step, captured, x, logits, sampling, sampled, placed, plan.drafts, plan.num_draft_tokens, reports
        )

    def _entries(self, chunks: Sequence[Chunk]) -> TableEntries:
        """New entries of the block tables that go with a step; what is too much for one copy has been sent."""
        entries = self._shadow.entries(chunks)
        while len(entries) > _ENTRIES_A_COPY:
            write_tables(self._tables, self._buffers.send_entries(entries[:_ENTRIES_A_COPY]))
            entries = entries[_ENTRIES_A_COPY:]
        return entries

    def _sample(self, queued: QueuedStep, masks: RowMasks) -> LaunchedStep:
        """Queues the sampling of a step."""
        if self._speculation is not None and queued.chunks is not None:
            return self._sample_and_draft(self._speculation, queued, queued.chunks, masks)
        if queued.logits is None:
            return LaunchedStep(self._stream.mark(), None, queued.reports)
        step = _sampling_words(queued.step, queued.sampling)
        words = self._sampler.launch(queued.logits, queued.sampling, step, self._masks.send(masks)).words
        host = self._fetch(words)
        return LaunchedStep(self._stream.mark(), lambda: StepResult(self._sampler.read(host)), queued.reports)

    def _sample_and_draft(
        self, speculation: CudaSpeculation, queued: QueuedStep, chunks: SampledChunks, masks: RowMasks
    ) -> LaunchedStep:
        """Queues the sampling of a step, and behind the copy of its results what prepares the next one."""
        step, sampling, forward = queued.step, queued.sampling, queued.forward
        read = None
        if queued.logits is not None:
            words = _sampling_words(step, sampling)
            masked = self._masks.send(chunks.masks(masks))
            results = self._sampler.launch(queued.logits, sampling, words, masked, speculation.drafted).words
            sampled = step.extra[: chunks.words.size].view(chunks.words.shape)
            speculation.accept(step, words, sampled, chunks, results, masked)
            host = self._fetch(results)
            read = lambda: speculation.read(host, chunks)  # noqa: E731
        launched = LaunchedStep(self._stream.mark(), read, queued.reports)
        if queued.logits is not None:
            speculation.settle(step, chunks)
        if queued.drafts:
            replay, captured = self._draft_graphs.replay, queued.captured
            out = replay(captured, step.has_adapters).x if captured else self._draft(queued.x, step.rows, forward)
            if queued.logits is not None and queued.num_draft_tokens:
                speculation.draft(out, chunks, sampling, queued.num_draft_tokens)
        return launched

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
        return StepOutput(x, self.forward.logits(x[: self._sampled]))

    def _draft_shape(self, shape: StepShape, adapters: bool) -> StepOutput:
        return StepOutput(self._draft(self._graphs.output(shape, adapters).x, self._buffers.keep(shape), self.forward))

    def _layers(self, rows: StepRows, forward: DeviceForward, adapters: bool, *, apart: bool = True) -> Tensor:
        return forward.layers(rows, self._attention_of(rows), adapters=adapters, apart=apart)

    def _draft(self, x: Tensor, rows: StepRows, forward: DeviceForward) -> Tensor:
        return forward.draft(x, rows, self._attention_of(rows))

    def _attention_of(self, rows: StepRows) -> DecodeAttention | None:
        return self._attention[decode_bucket(rows.decodes)] if rows.decodes else None


def _sampling_words(step: LoadedStep, sampling: SampleRows) -> Tensor:
    """[3, R] int32: SampleRows.step on the device, the last of the step's extra words."""
    return step.extra[step.extra.numel() - sampling.step.size :].view(3, -1)
