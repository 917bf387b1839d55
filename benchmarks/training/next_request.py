"""Time from an adapter in training to the next request that it answers: published, served, asked."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping

from benchmarks.lib.in_process import Prompt
from benchmarks.lib.memory_store import MemoryStore
from benchmarks.training.pod import TrainingPod
from services.common.adapters.events import AdapterEvents, EventKind
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.engine.loop.loop import EngineLoop
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.trainer.jobs.base import JobRun
from services.trainer.runtime.publish import Publisher

_SYNC_SECONDS = 30.0
_ANSWER_SECONDS = 60.0


class Unheard(AdapterEvents):
    """Events that no other engine waits for: there is no Redis."""

    def __init__(self) -> None:
        """Connects to nothing."""

    def publish(self, kind: EventKind, version: AdapterVersion | str | None = None) -> None:
        """See AdapterEvents."""


def registry_in_memory() -> AdapterRegistry:
    """An empty one, for training_pod()."""
    return AdapterRegistry(MemoryStore(), "base")


class NextRequest:
    """Publishes as the trainer's worker does at the end of a job, and asks as a client does.

    Args:
        pod: with registry_in_memory().
        adapter: gets a version a call.
        prompt: of the request.
    """

    def __init__(self, pod: TrainingPod, adapter: str, prompt: Prompt) -> None:
        self._pod = pod
        self._adapter = adapter
        self._prompt = prompt
        self._publisher = Publisher(pod.registry, Unheard(), pod.host, _SYNC_SECONDS)
        self._jobs = itertools.count()

    def __call__(self, run: JobRun, metrics: Mapping[str, float]) -> dict[str, float]:
        """Makes the run's adapter, as it is, a version and has a request that names no version answered by it.

        Returns:
            Seconds: publish (the files into the store), serve (into a slot of the engine), first_token.

        Raises:
            RuntimeError: another version has answered.
        """
        began = time.perf_counter()
        manifest = self._publisher.publish(
            self._adapter,
            f"job-{next(self._jobs)}",
            run.files(""),
            parent=None,
            metrics=metrics,
            fence=lambda: None,
        )
        published = time.perf_counter()
        self._publisher.serve(manifest, attach=False, fence=lambda: None)
        served = time.perf_counter()
        answered_by = first_token(self._pod.engine.loop, self._prompt, AdapterChoice(name=self._adapter))
        done = time.perf_counter()
        if answered_by != str(manifest.ref):
            raise RuntimeError(f"{answered_by or 'the base model'} has answered, not {manifest.ref}")
        return {"publish": published - began, "serve": served - published, "first_token": done - served}


def first_token(loop: EngineLoop, prompt: Prompt, adapter: AdapterChoice) -> str:
    """Waits for the first token of a greedy request; the version that sampled it, empty for the base.

    Raises:
        RuntimeError: it failed, or took a minute.
    """
    seen: list[SequenceUpdate] = []
    ended = threading.Event()

    def sink(updates: list[SequenceUpdate]) -> None:
        seen.extend(updates)
        if any(update.finish_reason is not None for update in updates):
            ended.set()

    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    loop.submit(Submission("next-request", prompt, sampling, adapter), sink)
    if not ended.wait(_ANSWER_SECONDS):
        raise RuntimeError(f"no token in {_ANSWER_SECONDS:.0f} s")
    if seen[-1].error is not None:
        raise RuntimeError(f"the request failed: {seen[-1].error}")
    return next((update.adapter for update in seen if update.adapter is not None), "")
