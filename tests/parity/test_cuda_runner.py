"""The engine's runner on a GPU: the plain runner's logits, in graphs and out of them, without waiting for the device.

Selected only where there is a GPU (`-m cuda`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import AdapterRejected
from services.engine.executors.cuda.runner import RunnerOptions
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.prompt_scoring import PromptRead
from services.engine.requests.request import Pooling, Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import BlockCopy, Chunk, StepPlan
from tests.parity.conftest import Pair
from tests.parity.fused_models import (
    TINY,
    cuda_runner,
    decoded,
    random_adapter,
    random_adapters,
    random_model,
)
from tests.parity.in_step import InStep
from tests.parity.reference import CHUNKS, LENGTHS
from tests.parity.test_fused import FP8_SUMS, LIMITS, QUANTIZABLE, requests

pytestmark = pytest.mark.cuda

GPU = torch.device("cuda")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@pytest.mark.parametrize("name", ["grouped", "odd-heads"])
def test_prompts_of_every_length_and_chunk(pairs: dict[str, Pair], name: str, chunk: int | None) -> None:
    fused = Qwen3_5.from_directory(pairs[name].path, dtype="float32", device="cuda")
    limits = replace(LIMITS, max_num_seqs=1, token_budget=chunk or 300)
    run = InStep(pairs[name].model, fused, limits, pending=True)
    run.run(requests(*(length for length in LENGTHS if length <= 65 or chunk != 1), tokens=3))


@pytest.mark.parametrize(
    "options",
    [RunnerOptions(), RunnerOptions(pdl=True), RunnerOptions(batch_invariant=True)],
    ids=["plain", "programmatic", "invariant"],
)
@pytest.mark.parametrize("name", ["grouped", "odd-heads"])
def test_graphs_of_decodes_prefills_and_mixed_steps(pairs: dict[str, Pair], name: str, options: RunnerOptions) -> None:
    """Against float64, beside the plain forward in float32 on the CPU: of adapters of this size that is itself 1.5e-4
    to 3.2e-4 from it for odd-heads, transformers' with PEFT as well."""
    fused = Qwen3_5.from_directory(pairs[name].path, dtype="float32", device="cuda")
    exact = Qwen3_5.from_directory(pairs[name].path, dtype=torch.float64, device="cpu")
    plain = Qwen3_5.from_directory(pairs[name].path, dtype="float32", device="cpu")
    limits = replace(LIMITS, max_num_seqs=20, num_slots=40, num_blocks=200, token_budget=300, mixed_prefill_tokens=64)
    run = InStep(exact, fused, limits, pending=True, largest_graph=24, adapters=2, options=options, baseline=plain)
    captured = run.runner.captures
    lengths = [1 + 13 * n % 90 for n in range(24)]
    run.run(requests(*lengths, tokens=12, adapters=(0, 1, 2) * 8), arrivals=3)
    run.run(requests(*lengths[:6], tokens=4))
    assert run.runner.captures == captured
    assert run.runner.replays >= run.steps // 2


def test_graphs_of_steps_whose_writes_wait(pairs: dict[str, Pair]) -> None:
    """As in large batches, here in small ones: graphs of one size find states as those of another left them."""
    fused = Qwen3_5.from_directory(pairs["grouped"].path, dtype="float32", device="cuda")
    limits = replace(LIMITS, max_num_seqs=20, num_slots=40, num_blocks=200, token_budget=300, mixed_prefill_tokens=64)
    run = InStep(pairs["grouped"].model, fused, limits, pending=True, largest_graph=24, late=True)
    run.run(requests(*(1 + 13 * n % 90 for n in range(24)), tokens=25), arrivals=3)
    assert run.runner.replays >= run.steps // 2


def test_swaps_and_growth_capture_nothing() -> None:
    """Adapters come and go while requests decode; their slots, blocks and lengths change under the same graphs."""
    fused = random_model(TINY, torch.float32, GPU)
    limits = replace(LIMITS, token_budget=64)
    run = InStep(random_model(TINY, torch.float32), fused, limits, largest_graph=4, adapters=2)
    captured = run.runner.captures
    for seed in range(20):
        for slots in (run.lora, run.plain_lora):
            slots.load(1 + seed % 2, random_adapter(TINY, 1 + seed % 4, seed))
        run.run(requests(30, 3, 5, tokens=20, adapters=(1, 2, 0)))
    assert run.runner.captures == captured
    assert run.runner.replays > 300


def test_garbage_waits_for_the_end_of_a_capture() -> None:
    """Runners refer to themselves, so that the collector ends them and their graphs, which no capture survives."""

    class Garbage:
        def __init__(self) -> None:
            self.graph = torch.cuda.CUDAGraph()
            self.itself = self
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                self.graph.capture_begin()
                self.tensor = torch.zeros(4, device=GPU)
                self.graph.capture_end()

    fused = random_model(TINY, torch.float32, GPU)
    before = gc.get_threshold()
    for _ in range(8):
        Garbage()
    gc.set_threshold(1, 1, 1)
    try:
        runner = cuda_runner(fused, LIMITS, random_adapters(fused, 0), largest_graph=4)
    finally:
        gc.set_threshold(*before)
    assert runner.captures > 0
    assert gc.isenabled()


def test_a_refused_adapter_changes_nothing() -> None:
    """Its slot adds nothing afterwards; the other one answers on, in the same graphs."""
    fused = random_model(TINY, torch.float32, GPU)
    limits = replace(LIMITS, token_budget=64)
    run = InStep(random_model(TINY, torch.float32), fused, limits, largest_graph=4, adapters=2)
    captured = run.runner.captures
    good, path = random_adapter(TINY, 4, 9), "layers.0.mlp.down_proj"
    spoilt = replace(good.targets[path], b=torch.full_like(good.targets[path].b, float("nan")))
    for slots in (run.lora, run.plain_lora):
        slots.clear(2)
        with pytest.raises(AdapterRejected, match=rf"{path}\.lora_B.* has values that are not finite"):
            slots.load(2, replace(good, targets={**good.targets, path: spoilt}))
    run.run(requests(30, 3, 5, tokens=20, adapters=(1, 2, 0)))
    assert run.runner.captures == captured


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_launching_never_waits_for_the_device(quantization: str) -> None:
    model = random_model(QUANTIZABLE, torch.bfloat16, GPU, quantization=quantization)
    runner = cuda_runner(model, LIMITS, random_adapters(model, 1), largest_graph=2)
    everything = SamplingParams(top_k=5, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0}, top_logprobs=3)
    first = Request("a", (1, 2, 3), everything)
    other = Request("b", tuple(range(70)), SamplingParams(seed=1))
    blocks, more = [1], [2, 3, 4, 5, 6]
    plans = [
        StepPlan([Chunk(first, (1, 2, 3), 0, blocks, 1, True, [], 0)]),
        StepPlan(
            [
                Chunk(first, (-1,), 3, blocks, 1, True, [], 1),
                Chunk(other, range(70), 0, more, 2, True, [], 0, snapshots=((20, 7), (21, 8))),
            ],
            block_copies=[BlockCopy(7, 8)],
        ),
        StepPlan([Chunk(first, (-1,), 4, blocks, 1, True, [], 2), Chunk(other, (-1,), 70, more, 2, True, [], 1)]),
    ]
    runner.launch(plans[0]).result()  # the tables of penalties grow once
    for _ in range(3):
        with no_waiting():
            handles = [runner.launch(plan) for plan in plans]
        assert all(token.error is None for handle in handles for token in handle.result().tokens)


def test_prompts_are_read_behind_graphs() -> None:
    """Prompts of captured prefills and mixed steps, rows with adapters and without; nothing is captured for it."""
    fused = random_model(TINY, torch.float32, GPU)
    limits = replace(LIMITS, max_num_seqs=20, num_slots=40, num_blocks=200, token_budget=300, mixed_prefill_tokens=64)
    run = InStep(random_model(TINY, torch.float32), fused, limits, largest_graph=24, adapters=2)
    run.compares_logits = False
    captured = run.runner.captures
    asked = [
        replace(request, prompt_logprobs=n % 4 if n % 3 else None, pooling=(None, Pooling.LAST, Pooling.MEAN)[n % 3])
        for n, request in enumerate(requests(*(1 + 13 * n % 90 for n in range(18)), tokens=5, adapters=(0, 1, 2) * 6))
    ]
    run.run(asked, arrivals=3)
    assert run.runner.captures == captured
    assert run.runner.replays > 0
    assert run.reports >= 12


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_reading_prompts_never_waits_for_the_device(quantization: str) -> None:
    model = random_model(QUANTIZABLE, torch.bfloat16, GPU, quantization=quantization)
    runner = cuda_runner(model, LIMITS, random_adapters(model, 1), largest_graph=2)
    once = SamplingParams(temperature=0.0, max_tokens=1)
    long, short = tuple(n % 60 for n in range(70)), tuple(range(9))
    scored = Request("a", long, once, prompt_logprobs=5, pooling=Pooling.MEAN)
    vector = Request("b", short, once, pooling=Pooling.LAST)
    first, second = (
        Chunk(scored, long, 0, [1, 2, 3, 4, 5], 1, True, [], 0),
        Chunk(vector, short, 0, [6], 2, True, [], 0),
    )
    plans = [
        StepPlan([first, second], reads=[PromptRead(0, 0, 70), PromptRead(1, 8, 9)]),
        StepPlan([first, second], reads=[PromptRead(1, 8, 9)]),
        StepPlan([first, second], reads=[PromptRead(0, 0, 70)]),
        # As many rows, so by the same kernels: those for a few do not round activations to fp8.
        StepPlan([second, first], reads=[PromptRead(0, 8, 9)]),
    ]
    for plan in plans:
        runner.launch(plan).result()
    for _ in range(3):
        with no_waiting():
            handles = [runner.launch(plan) for plan in plans]
        (whole, last), (same,), (scores,), (moved,) = (handle.result().reports for handle in handles)
        assert whole.scores is not None
        assert whole.scores.top_ids.shape == (69, 5)
        assert whole.finite
        assert scores.scores is not None
        assert np.array_equal(scores.scores.logprobs, whole.scores.logprobs)
        assert last.pooled is not None
        assert same.pooled is not None
        assert np.array_equal(last.pooled, same.pooled)
        assert moved.pooled is not None
        assert abs(last.pooled - moved.pooled).max() < 0.1


def test_many_rows_of_int4_matrices() -> None:
    """Beyond the rows of the streaming products: they multiply with a decoded copy."""
    fused = random_model(QUANTIZABLE, torch.bfloat16, GPU, quantization="int4")
    run = InStep(decoded(fused), fused, replace(LIMITS, token_budget=300), tolerance=0.5)
    run.run(requests(290, 10, tokens=2))


@pytest.mark.parametrize(
    ("dtype", "allowed", "tolerance"),
    [(torch.float32, 1.01, FP8_SUMS), (torch.bfloat16, 1.3, 0.25)],
    ids=["float32", "bfloat16"],
)
def test_many_rows_of_fp8_matrices(dtype: torch.dtype, allowed: float, tolerance: float) -> None:
    """Beyond the rows of the streaming products activations are rounded to e4m3 too, which moves these logits by up to
    0.56. An exact forward that rounds the same numbers up and down leaves the error of the sums, and in bfloat16 that
    of its roundings: up to 0.15 in the interpreter, whose float32 is within 1e-5."""
    fused = random_model(QUANTIZABLE, dtype, GPU, quantization="fp8")
    limits = replace(LIMITS, token_budget=300)
    run = InStep(decoded(fused, torch.float64), fused, limits, tolerance=tolerance, follows=allowed)
    run.run(requests(290, 10, tokens=2))
