"""Steps that run before the first request, so that no request waits for a kernel to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from kernels.gpu.segments import TILE
from services.engine.constraints.masks import NO_MASKS, RowMasks
from services.engine.executors.cuda.buffers import StepShape
from services.engine.executors.cuda.shapes import decode_buckets, draft_counts
from services.engine.executors.cuda.stream import EngineStream
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import DRAFT, Chunk, StepPlan

_ROWS = (1, 3, 16)
"""Triton compiles variants for the integer 1 and for multiples of 16."""
_TIMED_STEPS, _TIMED_POSITION = 6, 640


def warm_up_shapes(
    shapes: Sequence[StepShape],
    max_num_seqs: int,
    token_budget: int,
    *,
    draft_tokens: int = 0,
    rows: Sequence[int] = (),
    apart: int = 0,
) -> list[StepShape]:
    """Shapes whose uncaptured run compiles every variant of the kernels that serving will launch, and reserves the
    memory of the largest step: sizes of one, odd ones, multiples of 16.

    Args:
        rows: of DeviceForward.rows_that_differ.
        apart: of DeviceForward.prompts_apart.
    """
    usual = (1, 7, 33, TILE, token_budget - 1, token_budget)
    sizes = sorted({size for size in (*usual, *rows) if 0 < size <= token_budget})
    extra = [StepShape.of(0, [size]) for size in sizes]
    extra += [StepShape.of(min(decodes, max_num_seqs), [9]) for decodes in _ROWS if token_budget > 25]
    if not shapes and 0 < apart < token_budget:
        # Decodes are rows of products of their own, whatever their number is. Where steps are captured, so are these.
        most = min(max_num_seqs, token_budget - apart)
        numbers = sorted({min(number, most) for bucket in decode_buckets(most) for number in (bucket - 1, bucket)})
        extra += [StepShape.of(number, [apart + number % 2]) for number in numbers if number]
    counts = draft_counts(draft_tokens)
    extra += [StepShape.of_groups(size, 1 + count) for size in sizes_to_try(max_num_seqs) for count in counts]
    return [*shapes, *extra]


def sizes_to_try(max_num_seqs: int) -> list[int]:
    """Numbers of rows or chunks with which kernels are launched."""
    return [size for size in _ROWS if size <= max_num_seqs]


def sampling_plans(max_num_seqs: int) -> Iterator[StepPlan]:
    """Prompts of one token that ask for everything a sampler can be asked for, in slots from 1 on."""
    plain = SamplingParams()
    edits: tuple[dict[str, Any], ...] = ({}, {"presence_penalty": 0.5}, {"logit_bias": {0: 1.0}})
    filters: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01})
    features = [replace(plain, **edit, **filtered) for edit in edits for filtered in filters]
    features += [replace(plain, temperature=0.0), replace(plain, top_logprobs=2)]
    for rows in sizes_to_try(max_num_seqs):
        for sampling in features:
            # Block 0 is scratch.
            yield StepPlan(
                [
                    Chunk(Request("warm-up", (0,), sampling), (0,), 0, [0], slot, True, [], 0)
                    for slot in range(1, rows + 1)
                ]
            )


def draft_plans(max_num_seqs: int, draft_tokens: int, block_size: int) -> Iterator[StepPlan]:
    """Decodes with every number of draft tokens, up to ``draft_tokens``."""
    for size, count in product(sizes_to_try(max_num_seqs), (0, *draft_counts(draft_tokens))):
        yield _draft_plan(size, count, 1, block_size)


def _draft_plan(chunks: int, draft_tokens: int, position: int, block_size: int) -> StepPlan:
    """Decodes in slots from 1 on, with draft tokens, behind which as many are drawn."""
    request = Request("warm-up", (0,), SamplingParams(ignore_eos=True))
    blocks = [0] * -(-(position + 2 + 2 * draft_tokens) // block_size)
    tokens = (0, *[DRAFT] * draft_tokens)
    return StepPlan(
        [
            Chunk(request, tokens, position, blocks, slot, True, [], 1, num_draft_tokens=draft_tokens)
            for slot in range(1, chunks + 1)
        ],
        drafts=draft_tokens > 0,
        num_draft_tokens=draft_tokens,
    )


def measured_costs(
    launch: Callable[[StepPlan], object],
    stream: EngineStream,
    sizes: Sequence[int],
    draft_tokens: int,
    max_model_len: int,
    block_size: int,
) -> StepCosts:
    """Seconds of steps with and without draft tokens.

    Args:
        launch: queues a step.
        sizes: numbers of decodes.
        draft_tokens: most of a chunk.
    """
    seconds: dict[tuple[int, int], float] = {}
    for size, count in product(sizes, (0, *draft_counts(draft_tokens))):
        plan = _draft_plan(size, count, min(_TIMED_POSITION, max_model_len // 2), block_size)
        launch(plan)
        begin = stream.mark(timed=True)
        for _ in range(_TIMED_STEPS):
            launch(plan)
        seconds[size, count] = begin.until(stream.mark(timed=True)) / _TIMED_STEPS
    return StepCosts(seconds)


def masks_to_try(plan: StepPlan, vocab: int) -> tuple[RowMasks, RowMasks]:
    """None, and one for each row that excludes nothing."""
    rows = len(plan.chunks)
    return NO_MASKS, RowMasks(range(rows), np.full((rows, -(-vocab // 32)), -1, dtype=np.int32))
