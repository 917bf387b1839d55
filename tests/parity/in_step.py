"""A run of the fused forward in step with the plain one: same plans, compared logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.cuda.launched_steps import QueuedStep
from services.engine.executors.cuda.runner import CudaRunner, RunnerOptions
from services.engine.models.interface import DeviceForward
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.outputs import Finished
from services.engine.requests.prompt_scoring import PromptReport
from services.engine.requests.request import Request
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import PENDING, Chunk, StepPlan
from tests.parity.fused_models import computing_as, cuda_runner, random_adapters, spoil
from tests.parity.roundings import recorded_roundings, rounded_activations, rounded_prompts

MEAN_FACTOR, LARGEST_FACTOR = 2.0, 4.0
"""Bounds of the fused forward's error, as multiples of the plain forward's in numbers of the same size.

Root mean square: exponentials and quotients of a GPU are within two units of the last place, those of a CPU within one.
Largest: that of one ill-conditioned row among thousands. Two forwards whose mean errors differed by 1.6 (the
interpreter's and the plain one, six prompts) had largest errors that differed by 3.4. A wrong row is off by 1e-2.
"""


@dataclass(slots=True)
class Differences:
    """Size of the differences of many logits from exact ones."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, logits: Tensor, exact: Tensor) -> float:
        """Takes the logits of a step. Returns their largest difference."""
        difference = logits.double().cpu() - exact.double().cpu()
        largest = float(difference.abs().max())
        self.largest = max(self.largest, largest)
        self.squares += float(difference.square().sum())
        self.count += difference.numel()
        return largest

    @property
    def root_mean_square(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


class InStep:
    """Runs every plan with the plain runner and with the CUDA runner, and compares their logits.

    Args:
        model: of the plain runner. Of float64: all of that runner computes in it, so that the difference is the
            error of the CUDA runner alone and not of two.
        fused: of the CUDA runner; the same weights, possibly as quantized matrices.
        adapters: random adapters to load, in slots from 1 on.
        tolerance: largest difference of two logits.
        pending: hide the tokens of decodes from the CUDA runner, which then takes them from its own last step.
        late: of cuda_runner().
        baseline: plain model of the fused one's dtype, which computes every step as well. Its differences from
            ``model`` in a whole run then bound those of the CUDA runner (see MEAN_FACTOR): the root mean square,
            and the largest one where that is above ``tolerance``.
        follows: the plain runner rounds activations as the CUDA runner did (see rounded_activations(): ``allowed``).
            None: it rounds none.
    """

    def __init__(
        self,
        model: Qwen3_5,
        fused: Qwen3_5,
        limits: SchedulerConfig,
        *,
        adapters: int = 0,
        options: RunnerOptions | None = None,
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        largest_graph: int = 0,
        tolerance: float = 2e-4,
        pending: bool = False,
        late: bool | None = None,
        baseline: Qwen3_5 | None = None,
        follows: float | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.tolerance, self._pending, self._follows = tolerance, pending, follows
        self._model = model
        self.plain_lora = random_adapters(model, adapters)
        self.plain = _plain_runner(model, limits, self.plain_lora)
        self._baseline = (
            None if baseline is None else _plain_runner(baseline, limits, random_adapters(baseline, adapters))
        )
        self.lora = random_adapters(fused, adapters)
        self.runner = cuda_runner(
            fused,
            limits,
            self.lora,
            options=options,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            largest_graph=largest_graph,
            late=late,
        )
        self.expected: list[Tensor] = []
        """Logits of the last step, the plain runner's."""
        self.ours: list[Tensor] = []
        """The same by the CUDA runner."""
        self.baseline_logits: list[Tensor] = []
        """The same by the baseline."""
        record(model, "logits", self.expected)
        if baseline is not None:
            record(baseline, "logits", self.baseline_logits)
        record_steps(self.runner, self.ours)
        self.steps = 0
        self.compares_logits = True
        self.reports = 0
        """Compared so far."""
        self.drafts = 0
        """Chunks whose draft tokens were compared so far."""
        self.errors: list[float] = []
        """Largest difference of two logits, of each step."""
        self.differences, self.baseline_differences = Differences(), Differences()

    def run(self, requests: Sequence[Request], *, arrivals: int = 99) -> dict[str, Finished]:
        """All requests, ``arrivals`` new ones a step; their results, with the tokens that the plain runner samples."""
        coming = list(requests)
        results: dict[str, Finished] = {}
        while coming or self.scheduler.has_work:
            for request in coming[:arrivals]:
                self.scheduler.add(request)
            del coming[:arrivals]
            plan = self.scheduler.schedule(0.0)
            assert plan is not None
            for update in self.scheduler.update(plan, self._step(plan), 0.0):
                if update.finished is not None:
                    results[update.request_id] = update.finished
        if self._baseline is not None:
            ours, baseline = self.differences, self.baseline_differences
            assert ours.largest <= max(self.tolerance, LARGEST_FACTOR * baseline.largest), (ours, baseline)
            assert ours.root_mean_square <= MEAN_FACTOR * baseline.root_mean_square, (ours, baseline)
        return results

    def _step(self, plan: StepPlan) -> Any:
        for logits in (self.expected, self.ours, self.baseline_logits):
            logits.clear()
        with recorded_roundings() as roundings:
            ours = self.runner.launch(self._hidden(plan) if self._pending else plan).result()
        with self._rounding(roundings), computing_as(self._model):
            result = self.plain.launch(plan).result()
        if self._baseline is not None:
            with self._rounding(roundings):
                self._baseline.launch(plan).result()
            for logits, expected in zip(self.baseline_logits, self.expected, strict=True):
                self.baseline_differences.add(logits, expected)
        self.steps += 1
        assert len(ours.tokens) == len(result.tokens)
        # Behind the step's own, the plain runner's are of draft tokens.
        for logits, expected in zip(self.ours, self.expected, strict=False) if self.compares_logits else ():
            error = self.differences.add(logits, expected)
            if self._baseline is None:
                assert error <= self.tolerance, (error, [(len(chunk.token_ids), chunk.start) for chunk in plan.chunks])
            self.errors.append(error)
        for mine, theirs in zip(ours.tokens, result.tokens, strict=True):
            assert mine.error is None
            if self.tolerance < 1e-3:
                assert mine.token_id == theirs.token_id
                assert abs(mine.sampling_logprob - theirs.sampling_logprob) < 10 * self.tolerance
        assert len(ours.accepted) == len(result.accepted)
        if self.tolerance < 1e-3:
            assert list(ours.accepted) == list(result.accepted)
            self._compare_drafts(plan)
        self._compare_reports(ours.reports, result.reports)
        return result

    def _compare_drafts(self, plan: StepPlan) -> None:
        """Compares the draft tokens of the requests that go on."""
        if not plan.num_draft_tokens:
            return
        assert self.runner._speculation is not None
        assert self.plain._speculation is not None
        drawn = self.runner._speculation._slots.drafts.tolist()
        for chunk in plan.chunks:
            if chunk.samples and (expected := list(self.plain._speculation._answers[chunk.slot].drafts)):
                assert drawn[chunk.slot][: len(expected)] == expected
                self.drafts += 1

    def _rounding(self, chosen: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Inside, the plain runner rounds activations as the CUDA runner did in this step, if it is to follow it."""
        if self._follows is None or not chosen:
            return nullcontext()
        prompts_only = self._model.weights.prompt_rows > 0
        return (rounded_prompts if prompts_only else rounded_activations)(chosen, allowed=self._follows)

    def _compare_reports(self, ours: Sequence[PromptReport], plain: Sequence[PromptReport]) -> None:
        """Compares the reports of prompts."""
        assert len(ours) == len(plain)
        self.reports += len(ours)
        for mine, theirs in zip(ours, plain, strict=True):
            parts, expected_parts = ((each.pooled, *(each.scores or ())) for each in (mine, theirs))
            for part, expected in zip(parts, expected_parts, strict=True):
                if expected is None or part is None:
                    assert part is expected
                elif expected.dtype == np.float32:
                    assert part.dtype == np.float32
                    np.testing.assert_allclose(part, expected, rtol=1e-4, atol=self.tolerance)
                else:
                    assert part.dtype == expected.dtype
                    assert part.tolist() == expected.tolist()

    @staticmethod
    def _hidden(plan: StepPlan) -> StepPlan:
        def hidden(chunk: Chunk) -> Chunk:
            known = chunk.start < len(chunk.request.prompt_token_ids)
            return chunk._replace(token_ids=(PENDING, *chunk.token_ids[1:])) if chunk.is_decode and not known else chunk

        return replace(plan, chunks=[hidden(chunk) for chunk in plan.chunks])


def _plain_runner(model: Qwen3_5, limits: SchedulerConfig, lora: LoraSlots) -> ModelRunner:
    """The CPU's runner, with caches as others may have left them."""
    with computing_as(model):
        cache = model.allocate_cache(limits.num_blocks, limits.block_size, limits.num_slots)
    spoil(cache)
    return ModelRunner(
        model,
        cache,
        lora,
        num_slots=limits.num_slots,
        eos_token_ids=sorted(limits.eos_token_ids),
        speculative=limits.draft_tokens > 0,
    )


def record(target: Any, name: str, into: list[Tensor]) -> None:
    """Keeps what a method that computes logits returns."""
    logits = getattr(target, name)

    def recording(x: Tensor) -> Tensor:
        out: Tensor = logits(x)
        into.append(out)
        return out

    setattr(target, name, recording)


def record_steps(runner: CudaRunner, into: list[Tensor]) -> None:
    """Keeps the logits of each step's sampled rows, captured in its graph or not."""
    queue = runner._queue

    def recording(plan: StepPlan, forward: DeviceForward) -> QueuedStep:
        queued = queue(plan, forward)
        if queued.logits is not None:
            into.append(queued.logits.clone())  # of a graph: its next replay writes them again
        return queued

    runner._queue = recording
