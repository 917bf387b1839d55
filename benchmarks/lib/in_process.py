"""The engine as a pod builds it, loop thread included, without gRPC, Redis and an object store."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog

from benchmarks.lib.adapters import GeneratedAdapters, adapter_name
from services.common.adapters.composition import Composition, Member
from services.engine.loop.loop import EngineLoop
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.models.registry import read_config
from services.engine.observability.events import EventStream
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Sink, Submission
from services.engine.settings import EngineSettings
from services.pod.engine import Engine, build_engine, tune_interpreter, use_threads
from services.pod.parts.loaded import LoadedEngine

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Run:
    """Result of one batch of requests; times are perf_counter() seconds."""

    began: float
    steps: list[tuple[float, list[SequenceUpdate]]] = field(default_factory=list)
    """Times at which the loop published, and the updates."""

    @property
    def seconds(self) -> float:
        """Seconds from the first submission to the last token of all."""
        return self.steps[-1][0] - self.began

    def latencies(self) -> tuple[list[float], list[float]]:
        """Seconds to each request's first token, and between all later ones of each request."""
        last: dict[str, float] = {}
        first: list[float] = []
        between: list[float] = []
        for now, updates in self.steps:
            for update in updates:
                if update.token is None:
                    continue
                before = last.get(update.request_id)
                if before is None:
                    first.append(now - self.began)
                else:
                    between.append(now - before)
                last[update.request_id] = now
        return first, between


class InProcessEngine:
    """Temperature 1, ignore_eos, and no prefix cache unless asked for: every run does the same work.

    Args:
        settings: prefix_cache and trainer are off unless asked for; adapter_slots grows to the adapters and two more.
        adapters: how many different LoRA adapters requests use; request i uses adapter i mod ``adapters``.
        rank: of each adapter.
        composed: adapters of which each of those is made for the requests, side by side in its slot.
        events: told what happens.
        prefix_cache: leave it on.
        trainer: with the plan's memory for training.
        loaded: of an engine that has slept.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        adapters: int = 0,
        rank: int = 16,
        composed: int = 1,
        events: EventStream | None = None,
        prefix_cache: bool = False,
        trainer: bool = False,
        loaded: LoadedEngine | None = None,
    ) -> None:
        config = read_config(settings.model)
        self.adapters, self._composed = adapters, composed
        self.registry = GeneratedAdapters(config, count=adapters * composed, rank=rank)
        slots = max(settings.adapter_slots, adapters + 2) if adapters else settings.adapter_slots
        settings = settings.model_copy(
            update={
                "prefix_cache": prefix_cache,
                "trainer": trainer,
                "adapter_slots": slots,
                "max_lora_rank": max(rank * composed, 16) if adapters else settings.max_lora_rank,
                "max_waiting": 4096,
            }
        )
        self.settings = settings
        use_threads(settings.torch_threads)
        self.engine: Engine = build_engine(settings, self.registry, None, events, loaded=loaded)
        tune_interpreter()
        self.engine.start()
        self.vocab_size = config.vocab_size
        self._random = np.random.default_rng(0)
        self._runs = 0

    @property
    def pipeline(self) -> StepPipeline:
        return self.engine.loop._pipeline

    @property
    def captures(self) -> int:
        """CUDA graphs captured since the start; 0 where there are none."""
        return int(getattr(self.pipeline._runner, "captures", 0))

    def stop(self) -> None:
        """Ends all threads."""
        self.engine.stop()

    def prompts(self, count: int, length: int) -> list[Prompt]:
        """New random tokens each time."""
        return [tuple(row) for row in self._random.integers(0, self.vocab_size, (count, length)).tolist()]

    def generate(
        self, prompts: Sequence[Prompt], new_tokens: int, *, decoding: Callable[[], None] | None = None
    ) -> Run:
        """Runs all prompts at once: what each step computes does not depend on the machine's speed, unless requests
        wait for adapters that load.

        Args:
            decoding: called on this thread once every request has its first token; when it returns the requests are
                ended, wherever they are.

        Raises:
            RuntimeError: a request failed.
        """
        done, started = threading.Event(), threading.Event()
        left, waiting = len(prompts), len(prompts)
        failed: list[str] = []
        self._runs += 1
        run = Run(0.0)

        def sink(updates: list[SequenceUpdate]) -> None:
            nonlocal left, waiting
            run.steps.append((time.perf_counter(), updates))
            for update in updates:
                if update.adapter is not None:
                    waiting -= 1
                if update.finish_reason is not None:
                    left -= 1
                    if update.error is not None:
                        failed.append(str(update.error))
            if waiting <= 0 and not started.is_set():
                started.set()
            if left == 0:
                done.set()

        sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)
        submissions = [
            Submission(f"{self._runs}-{index}", prompt, sampling, self._adapter(index))
            for index, prompt in enumerate(prompts)
        ]
        run.began = time.perf_counter()
        submit_together(self.engine.loop, submissions, sink)
        if decoding is not None:
            started.wait()
            decoding()
            self.engine.loop.abort_all(sink)
        else:
            done.wait()
        if failed:
            raise RuntimeError(failed[0])
        return run

    def _adapter(self, index: int) -> AdapterChoice:
        if not self.adapters:
            return AdapterChoice()
        first = index % self.adapters * self._composed
        return AdapterChoice.of(Composition(tuple(Member(adapter_name(first + n)) for n in range(self._composed))))


def submit_together(loop: EngineLoop, submissions: Sequence[Submission], sink: Sink) -> None:
    """Queues requests between two steps of a running loop: the next step finds all of them, however slow or loaded the
    machine is. One after the other, the first would run alone for as many steps as the others take to arrive.

    Raises:
        TemperError: one is refused; those before it run.
    """

    def submit() -> None:
        for submission in submissions:
            loop.submit(submission, sink)

    loop.call_at_boundary(submit).result()


def only_warnings() -> None:
    """Keeps the engine's log off standard output, where the figures go."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def settings_for(model: Path, device: str, **values: object) -> EngineSettings:
    """Engine settings with only what the benchmark varies, whatever the environment says."""
    return EngineSettings.model_validate({"model": model, "device": device, **values})
