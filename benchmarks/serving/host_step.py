"""Cost of one decode step for the engine loop's thread, without a model: planning, tokens, books, publishing.

    python -m benchmarks.serving.host_step [--sequences 1 64 256] [--steps 400]

Everything but the runner is the real thing, at depth 2; the runner answers at once with the same token for every row.
Prints one JSON line for each number of sequences, in microseconds of CPU a step (medians): ``plan`` (schedule),
``tokens`` (the runner's SampledToken objects), ``update`` (scheduler), ``publish`` (tracker, one sink), ``other`` (the
rest of an iteration: metrics, gate), their ``total``, and ``total_p99``. A runner on a device adds its launch, which is
not here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from services.common.errors import TemperError
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.runner import CompletedStep, OpenStep
from services.engine.loop.request_tracker import RequestTracker
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EventStream
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin, PrivateVersion
from services.engine.requests.outputs import SampledToken
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan, StepResult

_PROMPT = 512
_T = TypeVar("_T")


class StepTimer:
    """Microseconds by name, of the present step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., _T]) -> Callable[..., _T]:
        """Wrapper of a function that adds up its time under ``name``."""

        def call(*args: object) -> _T:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + 1e6 * (time.thread_time() - began)

        return call


class NullRunner:
    """Samples token 5 for every row, at once."""

    depth = 2
    costs = None

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(StepResult([SampledToken(5, -0.5) for chunk in plan.chunks if chunk.samples]))

    def open(self, plan: StepPlan) -> OpenStep:
        raise ValueError(f"no request here is constrained, but a step of {len(plan.chunks)} chunks is")


class BaseOnly:
    """Every request is for the base model."""

    def pin(self, choice: AdapterChoice | PrivateVersion) -> AdapterPin:
        return BASE_PIN

    def release(self, pin: AdapterPin) -> None:
        """Nothing is held."""

    def give_up(self, choice: AdapterChoice | PrivateVersion) -> None:
        """Nobody waits."""

    def overdue(self, choice: AdapterChoice | PrivateVersion) -> TemperError:
        return TemperError(f"{choice} was waited for, although the base always serves")


def measure(sequences: int, steps: int) -> dict[str, float]:
    """Medians of one number of running sequences."""
    blocks = sequences * (-(-(_PROMPT + steps + 10) // 16)) + 1
    config = SchedulerConfig(
        max_num_seqs=sequences,
        token_budget=8192,
        block_size=16,
        num_blocks=blocks,
        num_slots=sequences + 8,
        max_model_len=4 * _PROMPT + steps,
        prefix_cache=False,
    )
    watch = StepTimer()
    runner = NullRunner()
    pipeline = StepPipeline(config, runner, SliceGate(0.05), EventStream(), time.monotonic)
    tracker = RequestTracker(pipeline, BaseOnly(), RolloutBuffer(0, 1.0), EventStream(), 1.0, time.monotonic)
    for n in range(sequences):
        prompt = tuple(range(n, n + _PROMPT))
        sampling = SamplingParams(max_tokens=steps + 9)
        tracker.submit(Submission(f"request-{n}", prompt, sampling, AdapterChoice()), _drop, 0.0)
    while pipeline.scheduler.counts().waiting:
        tracker.publish(pipeline.advance(0))
    tracker.publish(pipeline.advance(0))

    scheduler = pipeline.scheduler
    for name, method in (("plan", "schedule"), ("update", "update")):
        setattr(scheduler, method, watch.timed(name, getattr(scheduler, method)))
    runner.launch = watch.timed("tokens", runner.launch)  # type: ignore[method-assign]
    advance, publish = watch.timed("advance", pipeline.advance), watch.timed("publish", tracker.publish)
    samples: list[dict[str, float]] = []
    for _ in range(steps - sequences * _PROMPT // 8192 - 2):
        watch.spent = {}
        publish(advance(0))
        spent = watch.spent
        whole = spent.pop("advance")
        spent["other"] = whole - spent["plan"] - spent["tokens"] - spent["update"]
        spent["total"] = whole + spent["publish"]
        samples.append(spent)
    figures = {name: round(median(sample[name] for sample in samples), 1) for name in samples[0]}
    totals = sorted(sample["total"] for sample in samples)
    return {**figures, "total_p99": round(totals[int(0.99 * len(totals))], 1)}


def _drop(updates: object) -> None:
    """A sink that hands on nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a decode step, without a model.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    for sequences in options.sequences:
        print(json.dumps({"sequences": sequences, **measure(sequences, options.steps)}), flush=True)


if __name__ == "__main__":
    main()
