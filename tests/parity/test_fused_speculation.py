"""Speculation on the GPU's runner, with two plans in flight: the tokens of a run without any."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.common.adapters.drafter_form import MTP_FORM, DrafterForm
from services.engine.executors.cuda.runner import CudaRunner
from services.engine.executors.runner import StepHandle
from services.engine.requests.outputs import Finished
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import DRAFT, PENDING, Chunk, StepPlan
from tests.parity.fused_models import TINY, cuda_runner, random_adapters, random_model
from tests.parity.test_fused import DEVICE, LIMITS, requests

SPECULATIVE = replace(LIMITS, draft_tokens=3, num_slots=20)


class Ahead:
    """Scheduler and runner with two plans in flight. With ``outputs`` most draft tokens are those that will be sampled:
    they are known from a run without draft tokens."""

    def __init__(
        self,
        limits: SchedulerConfig,
        outputs: dict[str, list[int]] | None = None,
        *,
        graphs: int = 0,
        adapters: int = 0,
        **options: Any,
    ) -> None:
        form = MTP_FORM if limits.draft_tokens <= 4 else DrafterForm(limits.draft_tokens)
        model = random_model(TINY, torch.float32, DEVICE, mtp=limits.draft_tokens > 0, form=form)
        self.runner = cuda_runner(model, limits, random_adapters(model, adapters), largest_graph=graphs, **options)
        # Without the costs: what is right in a test that steers does not depend on what a step takes.
        self.scheduler = Scheduler(limits, self.runner.depth)
        self._outputs = outputs or {}
        self.steps = 0
        self.rows: set[int] = set()
        """Numbers of rows that chunks of decodes had."""

    def run(self, asked: Sequence[Request], *, arrivals: int = 99) -> dict[str, Finished]:
        """All requests, ``arrivals`` new ones a step."""
        coming = list(asked)
        results: dict[str, Finished] = {}
        in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        while coming or self.scheduler.has_work:
            for request in coming[:arrivals]:
                self.scheduler.add(request)
            del coming[:arrivals]
            plan = self.scheduler.schedule(0.0) if len(in_flight) < 2 else None
            if plan is not None:
                in_flight.append((plan, self.runner.launch(plan)))
                self.steps += 1
                self.rows |= {len(chunk.token_ids) for chunk in plan.chunks if chunk.is_decode}
                steer(self.runner, plan, self._outputs)
            if in_flight and (plan is None or len(in_flight) == 2):
                done, handle = in_flight.popleft()
                for update in self.scheduler.update(done, handle.result(), 0.0):
                    if update.finished is not None:
                        assert update.error is None
                        results[update.request_id] = update.finished
        self.scheduler.discard()
        self.scheduler.check_integrity()
        return results


def steer(runner: CudaRunner, plan: StepPlan, outputs: dict[str, list[int]]) -> None:
    """Replaces two of three draft tokens behind a step by what will be sampled."""
    if plan.num_draft_tokens == 0:
        return
    runner.stream.synchronize()
    slots = runner._speculation._slots
    for chunk in plan.chunks:
        if not chunk.samples or chunk.request.request_id not in outputs:
            continue
        known = outputs[chunk.request.request_id]
        count = int(slots.computed[chunk.slot]) - len(chunk.request.prompt_token_ids) + 1
        for place in range(plan.num_draft_tokens):
            if count + place < len(known) and (count + place) % 3:
                slots.drafts[chunk.slot, place] = known[count + place]


def steered(
    made: list[Request], limits: SchedulerConfig = SPECULATIVE, *, arrivals: int = 99, adapters: int = 0, **options: Any
) -> Ahead:
    plain = Ahead(replace(limits, draft_tokens=0), adapters=adapters)
    expected = plain.run(made, arrivals=arrivals)
    known = {name: list(done.output_ids) for name, done in expected.items()}
    ahead = Ahead(limits, known, adapters=adapters, **options)
    results = ahead.run(made, arrivals=arrivals)
    assert {name: list(done.output_ids) for name, done in results.items()} == known
    for name, done in results.items():
        assert done.finish_reason == expected[name].finish_reason
        assert list(done.sampling_logprobs) == pytest.approx(list(expected[name].sampling_logprobs), abs=1e-3)
    assert ahead.steps < plain.steps
    counts = ahead.scheduler.counts()
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return ahead


def mixture(tokens: int) -> list[Request]:
    """Greedy, with noise, with log-probabilities, with a token to stop at, and with penalties."""
    made = requests(3, 5, 2, 4, 2, tokens=tokens)
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 4, "temperature": 0.8},
        {"temperature": 0.0, "top_logprobs": 2},
        {"temperature": 0.0, "stop_token_ids": frozenset(range(30, 36))},
        {"temperature": 0.0, "presence_penalty": 0.5},
    ]
    return [
        replace(one, sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | change))
        for one, change in zip(made, changes, strict=True)
    ]


@pytest.mark.parametrize(
    ("draft_tokens", "sorts", "tokens"),
    [
        (2, slice(0, 2), 5),
        (7, slice(0, 2), 12),
        *(pytest.param(count, slice(None), 7, marks=pytest.mark.thorough) for count in (1, 3)),
    ],
)
def test_draft_tokens_right_and_wrong(draft_tokens: int, sorts: slice, tokens: int) -> None:
    """Prompts come while others answer."""
    made = mixture(tokens)[sorts]
    limits = replace(SPECULATIVE, draft_tokens=draft_tokens, max_num_seqs=3)
    ahead = steered(made, limits, arrivals=len(made) // 2)
    assert {1, 1 + draft_tokens} <= ahead.rows


@pytest.mark.thorough
def test_edited_logits_count_no_more_than_four_draft_tokens() -> None:
    """Rows behind more are checked, and do not count."""
    sampling = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, frequency_penalty=0.7)
    made = [replace(requests(3, tokens=14)[0], sampling=sampling)]
    ahead = steered(made, replace(SPECULATIVE, draft_tokens=6, max_num_seqs=1))
    assert 7 in ahead.rows


@pytest.mark.thorough
def test_draft_tokens_beside_edited_logits() -> None:
    """Penalties count what was accepted and what a row follows, and min_tokens holds at each row. One without edits
    comes when there is a seat."""
    every = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.7,
        "min_tokens": 3,
        "stop_token_ids": frozenset(range(8)),
    }
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0, "logit_bias": {7: 0.5, 40: -1.0}} | every,
        {"temperature": 0.9, "top_p": 0.9, "seed": 3, "presence_penalty": -1.0} | every,
        {"temperature": 0.0},
    ]
    made = [
        replace(one, sampling=SamplingParams(max_tokens=7, ignore_eos=True, **change))
        for one, change in zip(requests(3, 2, 2, tokens=7), changes, strict=True)
    ]
    ahead = steered(made, replace(SPECULATIVE, max_num_seqs=2))
    assert 4 in ahead.rows


@pytest.mark.thorough
def test_states_at_the_end_of_answers_are_kept() -> None:
    """The next turns of conversations go on from them, wherever in a run of accepted tokens the answers ended."""
    limits = replace(SPECULATIVE, block_size=4, max_num_seqs=2, num_blocks=90)
    first = [replace(one, session=one.request_id) for one in mixture(9)[2:4]]
    plain = Ahead(replace(limits, draft_tokens=0))
    answers = plain.run(first)
    more = [
        replace(
            one,
            request_id=f"more {one.request_id}",
            prompt_token_ids=(*one.prompt_token_ids, *answers[one.request_id].output_ids, 7, 8),
            sampling=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
            arrival=9,
        )
        for one in first
    ]
    expected = Ahead(replace(limits, draft_tokens=0, prefix_cache=False)).run(more)
    known = {name: list(done.output_ids) for name, done in (answers | expected).items()}
    ahead = Ahead(limits, known)
    assert {name: list(done.output_ids) for name, done in ahead.run(first).items()} == {
        name: known[name] for name in answers
    }
    results = ahead.run(more)
    for one, before in zip(more, first, strict=True):
        done = results[one.request_id]
        assert list(done.output_ids) == known[one.request_id]
        assert done.cached_tokens == len(before.prompt_token_ids) + len(known[before.request_id]) - 1


def test_caches_without_room_for_draft_tokens_are_refused() -> None:
    model = random_model(TINY, torch.float32, mtp=True)
    with pytest.raises(ValueError, match="waiting writes and verified rows"):
        cuda_runner(model, SPECULATIVE, random_adapters(model, 0), verified=False)
    with pytest.raises(ValueError, match="6 draft tokens beside states with room for 8"):
        cuda_runner(model, replace(SPECULATIVE, draft_tokens=6), random_adapters(model, 0))


@pytest.mark.cuda
def test_graphs() -> None:
    lengths = [1 + 13 * n % 90 for n in range(12)]
    made = requests(*lengths, tokens=20, adapters=(0, 1, 2) * 4)
    ahead = steered(made, graphs=4, adapters=2, arrivals=3)
    captured = ahead.runner.captures
    ahead.run(requests(7, 9, tokens=1))
    assert ahead.runner.captures == captured
    assert ahead.runner.replays > ahead.steps // 2
    costs = ahead.runner.costs
    assert costs is not None
    for chunks, count in product(range(1, 5), range(SPECULATIVE.draft_tokens + 1)):
        seconds = costs.seconds(chunks, count)
        assert seconds is not None
        assert 0 < seconds < 1


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [0, 4])
def test_launching_never_waits_for_the_device(graphs: int) -> None:
    from tests.parity.test_cuda_runner import no_waiting

    model = random_model(TINY, torch.bfloat16, DEVICE, mtp=True)
    runner = cuda_runner(model, SPECULATIVE, random_adapters(model, 1), largest_graph=graphs)
    first, other = requests(5, 70, tokens=40)
    blocks, more = [1, 2], [3, 4, 5, 6, 7]
    drawing = {"drafts": True, "num_draft_tokens": 2}
    plans = [
        StepPlan([Chunk(first, first.prompt_token_ids, 0, blocks, 1, True, [], 0)], **drawing),
        StepPlan([Chunk(first, (PENDING, DRAFT, DRAFT), 5, blocks, 1, True, [], 1, num_draft_tokens=2)], **drawing),
        StepPlan(
            [
                Chunk(first, (PENDING,), 6, blocks, 1, True, [], 2),
                Chunk(other, other.prompt_token_ids, 0, more, 3, True, [], 0),
            ],
            **drawing,
        ),
        StepPlan(
            [
                Chunk(first, (PENDING,), 7, blocks, 1, True, [], 3),
                Chunk(other, (PENDING, DRAFT), 70, more, 3, True, [], 1, num_draft_tokens=1),
            ],
            **drawing,
        ),
    ]
    for plan in plans:
        runner.launch(plan).result()
    for plan in plans:
        with no_waiting():
            handle = runner.launch(plan)
        result = handle.result()
        assert all(token.error is None for token in result.tokens)
        assert len(result.accepted) == len(plan.chunks)
        assert min(result.accepted) >= 1
