"""Scheduler, runner and model together: whatever is batched, split, preempted or taken from the prefix cache, each
request gets the tokens that transformers' generate() gives it alone."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.cuda.runner import RunnerOptions
from services.engine.executors.runner import Runner, StepHandle
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.observability.status import Counts
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan
from tests.parity.conftest import Pair
from tests.parity.fused_models import cuda_runner, spoil

EOS = 5
MAX_TOKENS = 24


def prompts() -> list[tuple[int, ...]]:
    """Prompts with shared beginnings, of lengths around block and chunk boundaries."""
    generator = torch.Generator().manual_seed(3)
    system = tuple(torch.randint(6, 211, (40,), generator=generator).tolist())
    made = []
    for index, length in enumerate((1, 2, 15, 16, 17, 31, 33, 47, 64, 65)):
        tail = tuple(torch.randint(6, 211, (length,), generator=generator).tolist())
        made.append(system + tail if index % 2 else tail)
    return made + made[-3:]


@functools.cache
@torch.no_grad()
def generate(reference: Qwen3_5ForCausalLM, prompt: tuple[int, ...]) -> list[int]:
    """transformers' own answer, asked for once a prompt: it is the longest part of most tests here."""
    output = reference.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def make_runner(
    model: Qwen3_5, config: SchedulerConfig, lora: LoraSlots, options: RunnerOptions | None = None
) -> Runner:
    """The runner of the model's device, with caches as others may have left them."""
    if model.device.type == "cuda":
        return cuda_runner(model, config, lora, largest_graph=8, options=options)
    cache = model.allocate_cache(config.num_blocks, config.block_size, config.num_slots)
    spoil(cache)
    return ModelRunner(
        model, cache, lora, num_slots=config.num_slots, eos_token_ids=[EOS], speculative=config.draft_tokens > 0
    )


def updates_of(
    scheduler: Scheduler, runner: Runner, requests: list[Request], arrivals: int
) -> Iterator[SequenceUpdate]:
    """Runs the requests, ``arrivals`` new ones a step."""
    coming = list(requests)
    flights: deque[tuple[StepPlan, StepHandle]] = deque()
    while coming or flights or scheduler.has_work:
        for request in coming[:arrivals]:
            scheduler.add(request)
        del coming[:arrivals]
        plan = scheduler.schedule(0.0)
        if plan is not None:
            flights.append((plan, runner.launch(plan)))
        if plan is None or len(flights) == runner.depth:
            done, handle = flights.popleft()
            yield from scheduler.update(done, handle.result(), 0.0)
        scheduler.check_integrity()


def serve(
    model: Qwen3_5,
    requests: list[Request],
    *,
    arrivals: int,
    lora: LoraSlots | None = None,
    options: RunnerOptions | None = None,
    counts: list[Counts] | None = None,
    **changes: int | bool,
) -> tuple[list[Finished], int]:
    """Runs the requests, ``arrivals`` new ones a step; returns the results in the order of requests and how often
    one was preempted.

    Args:
        options: of the runner, on a GPU.
        counts: gets the scheduler's counts at the end.
        changes: fields of SchedulerConfig.
    """
    limits: dict[str, int | bool] = {
        "max_num_seqs": 8,
        "token_budget": 48,
        "block_size": 16,
        "num_blocks": 200,
        "num_slots": 24,
        "max_model_len": 512,
        **changes,
    }
    config = SchedulerConfig(**limits, eos_token_ids=frozenset({EOS}))
    if lora is None:
        lora = LoraSlots(model.config, 1, 4, model.dtype, model.device)
    runner = make_runner(model, config, lora, options)
    scheduler = Scheduler(config, runner.depth, costs=runner.costs)
    finished: dict[str, Finished] = {}
    for update in updates_of(scheduler, runner, requests, arrivals):
        if update.finished is not None:
            finished[update.request_id] = update.finished
    if counts is not None:
        counts.append(scheduler.counts())
    return [finished[request.request_id] for request in requests], scheduler.counts().preemptions


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arrivals", "changes"),
    [
        (13, {}),
        (1, {"prefix_cache": False}),
        (1, {}),
        (2, {"token_budget": 9}),
        (13, {"num_blocks": 9, "block_size": 16}),
        (3, {"num_blocks": 34, "block_size": 4, "num_slots": 10}),
    ],
    ids=["at once", "no cache", "one by one", "small chunks", "few blocks", "few small blocks"],
)
def test_greedy_text_is_that_of_generate(pairs: dict[str, Pair], arrivals: int, changes: dict[str, int | bool]) -> None:
    reference, model = pairs["grouped"].reference, pairs["grouped"].model
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    requests = [Request(f"r{n}", prompt, sampling, arrival=n) for n, prompt in enumerate(prompts())]
    results, preemptions = serve(model, requests, arrivals=arrivals, **changes)
    for result in results:
        assert list(result.output_ids) == generate(reference, result.request.prompt_token_ids), (
            result.request.request_id
        )
    assert (preemptions > 0) == ("num_blocks" in changes)
    hits = sum(result.cached_tokens for result in results)
    assert (hits > 0) == (changes.get("prefix_cache", True) and "num_blocks" not in changes) or "num_blocks" in changes


def test_a_seed_gives_the_same_tokens_whatever_else_happens(pairs: dict[str, Pair]) -> None:
    """Alone, in a crowd, and preempted: same seed, same tokens."""
    model = pairs["grouped"].model

    def requests() -> list[Request]:
        return [
            Request(
                f"r{n}",
                prompt,
                SamplingParams(
                    seed=100 + n, max_tokens=MAX_TOKENS, presence_penalty=0.5, repetition_penalty=1.1, ignore_eos=True
                ),
                arrival=n,
            )
            for n, prompt in enumerate(prompts())
        ]

    crowd, _ = serve(model, requests(), arrivals=13)
    squeezed, preemptions = serve(model, requests(), arrivals=13, num_blocks=9)
    alone = [serve(model, [request], arrivals=1)[0][0] for request in requests()[:4]]
    assert preemptions > 0
    for one, other in zip(crowd, squeezed, strict=True):
        assert list(one.output_ids) == list(other.output_ids)
    for one, other in zip(crowd, alone, strict=False):
        assert list(one.output_ids) == list(other.output_ids)
