"""Constrained requests on the GPU's runner, whose steps overlap: the plain runner's tokens, and such as masks allow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import tests.kernels.gpu.interpreter  # noqa: F401
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.constraints.masks import RowMasks
from services.engine.constraints.matcher import ConstraintBroken, OutputMatcher
from services.engine.constraints.vocabulary import Bits, Vocabulary, allow
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.cuda.launched_steps import LaunchedStep, OpenedStep
from services.engine.executors.cuda.runner import CudaRunner
from services.engine.executors.runner import OpenStep, Runner, StepHandle
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EventStream
from services.engine.observability.status import Counts
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan
from tests.parity.fused_models import TINY, cuda_runner, random_adapters, random_model
from tests.parity.test_fused import DEVICE, LIMITS
from tests.parity.test_fused_speculation import steer

MODULUS = 7


class _Words:
    """All of a vocabulary that these matchers need."""

    words = -(-TINY.vocab_size // 32)

    def fill(self, matchers: Any, masks: Any) -> None:
        assert not matchers


class Sums(OutputMatcher):
    """Tokens of which each and the one before it add up to a multiple of seven: a mask for each token."""

    def __init__(self, first: int) -> None:
        super().__init__(cast(Vocabulary, _Words()), None, None, frozenset(), param="sums")
        self.newest = first

    def may_mask(self, count: int) -> bool:
        return True

    @property
    def masks(self) -> bool:
        return True

    def begin_mask(self, row: Bits) -> None:
        row[:] = 0
        allow(row, (token for token in range(TINY.vocab_size) if (token + self.newest) % MODULUS == 0))

    def advance(self, token_id: int) -> bool:
        if (token_id + self.newest) % MODULUS:
            raise ConstraintBroken("not a multiple")
        self.newest = token_id
        return False


def asked() -> list[Request]:
    constraint = Constraint(ConstraintKind.LARK, ("start: /never compiled/",))
    kinds: list[dict[str, Any]] = [
        {"seed": 3, "top_k": 5, "presence_penalty": 0.5, "top_logprobs": 2},
        {"seed": 2, "top_p": 0.8},
        {"temperature": 0.0},
    ]
    made = []
    for number, fields in enumerate(kinds):
        limited = number % 3 != 2
        sampling = SamplingParams(max_tokens=5 + number % 2, constraint=constraint if limited else None, **fields)
        prompt = tuple(range(1, 4 + number % 3))
        made.append(Request(f"r{number}", prompt, sampling, matcher=Sums(number) if limited else None))
    return made


class Steered:
    """The GPU's runner, most draft tokens of which are those that will be sampled."""

    depth, costs = 2, None

    def __init__(self, runner: CudaRunner, known: dict[str, list[int]]) -> None:
        self._runner, self._known = runner, known

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = self._runner.launch(plan)
        steer(self._runner, plan, self._known)
        return handle

    def open(self, plan: StepPlan) -> OpenStep:
        opened = self._runner.open(plan)
        assert isinstance(opened, OpenedStep)
        sample = opened.sample

        def sampled(masks: RowMasks) -> LaunchedStep:
            launched = sample(masks)
            steer(self._runner, plan, self._known)
            return launched

        opened.sample = sampled
        return opened


def outputs(runner: Runner, limits: SchedulerConfig, counts: list[Counts] | None = None) -> dict[str, list[int]]:
    """Outputs of all requests, two of which come at a time."""
    pipeline = StepPipeline(limits, runner, SliceGate(1.0), EventStream(), lambda: 0.0)
    coming = asked()
    found: dict[str, list[int]] = {}
    while coming or pipeline.busy:
        for request in coming[:2]:
            pipeline.scheduler.add(request)
        coming = coming[2:]
        for update in pipeline.advance(0):
            if update.finished is not None:
                assert update.finish_reason is FinishReason.LENGTH, update
                found[update.request_id] = list(update.finished.output_ids)
    if counts is not None:
        counts.append(pipeline.scheduler.counts())
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("speculative", [False, True])
def test_overlapping_steps_have_the_tokens_of_the_plain_runner(speculative: bool) -> None:
    limits = replace(LIMITS, draft_tokens=2, num_slots=20) if speculative else LIMITS
    plain_model = random_model(TINY, torch.float32, mtp=speculative)
    plain = ModelRunner(
        plain_model,
        plain_model.allocate_cache(limits.num_blocks, limits.block_size, limits.num_slots),
        random_adapters(plain_model, 0),
        num_slots=limits.num_slots,
        eos_token_ids=sorted(limits.eos_token_ids),
        speculative=speculative,
    )
    model = random_model(TINY, torch.float32, DEVICE, mtp=speculative)
    fused = cuda_runner(model, limits, random_adapters(model, 0))
    assert fused.depth == 2
    expected = outputs(plain, limits)
    counts: list[Counts] = []
    assert outputs(Steered(fused, expected) if speculative else fused, limits, counts) == expected
    assert (0 < counts[0].num_accepted_tokens < counts[0].num_draft_tokens) == speculative
    for number, request in enumerate(asked()):
        tokens = [number, *expected[request.request_id]]
        if request.matcher is not None:
            assert all((a + b) % MODULUS == 0 for a, b in itertools.pairwise(tokens)), number
