"""Speculation on the GPU's runner: the plain runner's tokens and drafts, and the tokens of a run without any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, StepPlan
from tests.parity.fused_models import TINY, cuda_runner, random_adapters, random_model
from tests.parity.in_step import InStep
from tests.parity.test_fused import DEVICE, LIMITS, requests

SPECULATIVE = replace(LIMITS, speculative=True, num_slots=20)


class Steered(InStep):
    """Every other draft token is the token that will be sampled: it is known from a run without draft tokens."""

    def __init__(self, *args: Any, outputs: dict[str, list[int]], **options: Any) -> None:
        super().__init__(*args, **options)
        self._outputs = outputs
        self.kinds: set[str] = set()

    def _step(self, plan: StepPlan) -> Any:
        result = super()._step(plan)
        self.kinds |= {"decode" if c.is_decode else "draft" if c.num_draft_tokens else "other" for c in plan.chunks}
        sampled = iter(result.tokens)
        drafts = []
        for chunk, draft in zip((c for c in plan.chunks if c.samples), result.draft_token_ids, strict=True):
            first, *_ = [next(sampled) for _ in range(chunk.sampled_rows)]
            right = chunk.num_draft_tokens and first.token_id == chunk.token_ids[-1]
            output = self._outputs[chunk.request.request_id]
            at = chunk.output_count + 1 + right
            drafts.append(output[at] if draft >= 0 and at < len(output) and at % 3 else draft)
        return replace(result, draft_token_ids=drafts)


def steered(made: list[Request], *, graphs: int = 0, adapters: int = 0, arrivals: int = 99) -> Steered:
    plain, fused = (random_model(TINY, torch.float32, device, mtp=True) for device in ("cpu", DEVICE))
    without = InStep(random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), LIMITS)
    if adapters:
        without = InStep(
            random_model(TINY, torch.float32), random_model(TINY, torch.float32, DEVICE), LIMITS, adapters=adapters
        )
    expected = {name: list(done.output_ids) for name, done in without.run(made, arrivals=arrivals).items()}
    run = Steered(plain, fused, SPECULATIVE, outputs=expected, largest_graph=graphs, adapters=adapters)
    results = run.run(made, arrivals=arrivals)
    assert {name: list(done.output_ids) for name, done in results.items()} == expected
    assert run.steps < without.steps
    counts = run.scheduler.counts()
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    return run


def test_states_that_are_behind_are_refused() -> None:
    model = random_model(TINY, torch.float32, mtp=True)
    with pytest.raises(ValueError, match="waiting_writes=0"):
        cuda_runner(model, SPECULATIVE, random_adapters(model, 0), waiting_writes=3)


def test_draft_tokens_right_and_wrong() -> None:
    """Prompts beside answers, one answer that nothing is drafted for, greedy and with noise."""
    made = requests(3, 5, tokens=6)
    made[1] = replace(made[1], sampling=SamplingParams(seed=4, temperature=0.8, max_tokens=6, ignore_eos=True))
    edited = SamplingParams(temperature=0.0, presence_penalty=0.5, max_tokens=4, ignore_eos=True)
    made.append(replace(requests(2, 2, 4)[2], sampling=edited))
    run = steered(made, arrivals=2)
    assert run.kinds == {"decode", "draft", "other"}


@pytest.mark.cuda
def test_graphs() -> None:
    lengths = [1 + 13 * n % 90 for n in range(12)]
    run = steered(requests(*lengths, tokens=20, adapters=(0, 1, 2) * 4), graphs=4, adapters=2, arrivals=3)
    captured = run.runner.captures
    run.run(requests(7, 9, tokens=1))
    assert run.runner.captures == captured
    assert run.runner.replays > run.steps // 2


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [0, 4])
def test_launching_never_waits_for_the_device(graphs: int) -> None:
    from tests.parity.test_cuda_runner import no_waiting

    model = random_model(TINY, torch.bfloat16, DEVICE, mtp=True)
    runner = cuda_runner(model, SPECULATIVE, random_adapters(model, 1), largest_graph=graphs)
    first, other = requests(5, 70, tokens=8)
    blocks, more = [1, 2], [3, 4, 5, 6, 7]
    plans = [
        StepPlan([Chunk(first, first.prompt_token_ids, 0, blocks, 1, True, [], 0)]),
        StepPlan(
            [
                Chunk(first, (7, 8), 5, blocks, 1, True, [7], 1, num_draft_tokens=1, out_slot=2),
                Chunk(other, other.prompt_token_ids, 0, more, 3, True, [], 0),
            ]
        ),
        StepPlan(
            [
                Chunk(other, (9,), 70, more, 3, True, [9], 1),
                Chunk(first, (7, 8, 9), 5, blocks, 1, True, [7, 8], 2, num_draft_tokens=1, out_slot=2),
            ]
        ),
    ]
    for plan in plans:
        runner.launch(plan).result()
    for plan in plans:
        with no_waiting():
            handle = runner.launch(plan)
        result = handle.result()
        assert all(token.error is None for token in result.tokens)
        assert len(result.draft_token_ids) == len(plan.chunks)
        assert min(result.draft_token_ids) >= 0
