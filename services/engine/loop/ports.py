"""What the engine loop takes in and what it needs of the parts around it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from services.common.errors import InvalidRequest, TemperError
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import (
    AdapterPin,
    Pooling,
    Request,
    SamplingParams,
    check_boundaries,
    check_prompt_logprobs,
)
from services.engine.requests.sessions import SessionName, check_session
from services.engine.scheduler.config import Counts
from services.engine.scheduler.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from services.engine.adapters.private_versions import PrivateVersion
    from services.engine.constraints.masks import RowMasks
    from services.engine.constraints.matcher import OutputMatcher
    from services.engine.server.protobuf import AdapterChoice


Sink = Callable[[list[SequenceUpdate]], None]
"""Gets the updates of one step for all requests that were submitted with it, at once. Called on the loop thread, so it
only hands them on (loop.call_soon_threadsafe) and never blocks. Sinks are told apart by equality."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request before its adapter is pinned, which happens on the loop thread, between two steps."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterChoice | PrivateVersion
    deadline: float | None = None
    """On the loop's clock (time.monotonic), seconds."""
    cache_salt: str = ""
    priority: int = 0
    """Lower runs first."""
    keep_rollout: bool = False
    owner: str = ""
    """Id of the API key that may train on the kept rollout; empty: there are no keys."""
    background: bool = False
    """Of this process itself, not a user's: it takes no place of the queue and is in no metric of latency. Whoever
    submits it bounds how many there are."""
    prompt_logprobs: int | None = None
    """See Request."""
    prompt_logprobs_from: int = 0
    pooling: Pooling | None = None
    matcher: OutputMatcher | None = None
    """See Request.matcher; made by ConstraintCompiler before the request is submitted."""
    traceparent: str = ""
    """See Request."""
    session: SessionName | None = None
    """See Request."""
    boundaries: tuple[int, ...] = ()
    """See Request."""

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id must not be empty", param="request_id")
        if not self.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_prompt_logprobs(self.prompt_logprobs, self.prompt_logprobs_from, len(self.prompt_token_ids))
        if self.session is not None:
            check_session(self.session)
        check_boundaries(self.boundaries, len(self.prompt_token_ids))

    def pinned(self, pin: AdapterPin, arrival: int) -> Request:
        """The scheduler's request."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            pin,
            self.deadline,
            self.cache_salt,
            self.priority,
            arrival,
            self.prompt_logprobs,
            self.prompt_logprobs_from,
            self.pooling,
            self.matcher,
            self.traceparent,
            self.session,
            self.boundaries,
        )


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits for the step; raises what it raised. Called once."""
        ...


class OpenStep(StepHandle, Protocol):
    """A step whose tokens are not sampled before its masks are there."""

    def seal(self, masks: RowMasks) -> None:
        """Samples under these masks, which are read before it returns. Called once, before ``result`` and before the
        next launch."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """The StepHandle of a runner that computes in ``launch``."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Runner(Protocol):
    """Runs plans in the order of their launch. Any exception ends the requests of the step."""

    @property
    def depth(self) -> int:
        """Plans that may be in flight: 1 if ``launch`` computes, 2 if it only queues work on a device."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts one step behind those in flight; a plan that is not ``masked``."""
        ...

    def open(self, plan: StepPlan) -> OpenStep:
        """Starts one step behind those in flight, up to its logits; a plan that is ``masked``."""
        ...


class AdapterResolver(Protocol):
    """Called on the loop thread only; no method blocks."""

    def pin(self, choice: AdapterChoice | PrivateVersion) -> AdapterPin | None:
        """The version that answers a request, held until ``release``.

        Returns:
            None while it is being loaded, or waits for a slot; the loop asks again after ``EngineLoop.retry_adapters``
            or a boundary call.

        Raises:
            TemperError: there is no such adapter, or it cannot be loaded.
        """
        ...

    def release(self, pin: AdapterPin) -> None:
        """The request has ended, and no step in flight computes for it any more; called once for each pin."""
        ...

    def give_up(self, choice: AdapterChoice | PrivateVersion) -> None:
        """No request waits for its pin to that choice any more, and the last of them did not get one."""
        ...

    def overdue(self, choice: AdapterChoice | PrivateVersion) -> TemperError:
        """What to tell a request that has waited for its pin for as long as any may."""
        ...


class EngineGate(Protocol):
    """The engine's side of the compute gate, which the loop holds while it has steps in flight."""

    @property
    def contended(self) -> bool:
        """Whether a trainer computes or waits to: the gate should be released after each step."""
        ...

    def acquire(self) -> None:
        """Waits until the device is the engine's."""
        ...

    def release(self, step_seconds: float) -> None:
        """No step is in flight; the last one computed for so long."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Around each launch of a step."""
        ...

    def engine_idle(self) -> None:
        """There is nothing to run, or what there is waits for something else than the device."""
        ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, for metrics."""

    seconds: float
    """With the wait for the training slice before it."""
    compute_seconds: float
    decodes: int
    prefill_tokens: int
    counts: Counts
    """After the step."""
    waiting_for_adapters: int
    mask_seconds: float = 0.0
    """To make the masks of the step; 0: it had none."""


class LoopObserver(Protocol):
    """Metrics. Called on the loop thread; never blocks."""

    def step_done(self, stats: StepStats) -> None: ...

    def step_failed(self, error: Exception) -> None: ...

    def request_done(self, finished: Finished, submitted_at: float, now: float) -> None:
        """Times are on the loop's clock."""
        ...


class GrammarObserver(Protocol):
    """Metrics of compiling. Called on the thread that takes requests in; never blocks."""

    def grammar_done(self, result: str, seconds: float) -> None:
        """One request's grammar is "cached", "compiled", "refused" or "overloaded", after so long."""
        ...


AdapterPhase: TypeAlias = Literal["download", "bind", "upload", "flip"]
"""Of a swap: files from the store, their tensors checked and read, into a slot, and a name moved between two steps."""
LoadFailure: TypeAlias = Literal["rejected", "missing", "unavailable", "no_slot", "error"]


class AdapterObserver(Protocol):
    """Metrics of adapters. Called on the threads that load them, and the loop's; never blocks."""

    def adapter_phase(self, phase: AdapterPhase, seconds: float) -> None:
        """A part of a swap has succeeded after so long."""
        ...

    def adapter_failed(self, reason: LoadFailure) -> None:
        """A version could not be loaded."""
        ...


class EngineObserver(LoopObserver, GrammarObserver, AdapterObserver, Protocol):
    """All metrics of an engine."""


class NoObserver:
    """Where nobody measures."""

    def adapter_phase(self, phase: AdapterPhase, seconds: float) -> None:
        """Ignores it."""

    def adapter_failed(self, reason: LoadFailure) -> None:
        """Ignores it."""

    def grammar_done(self, result: str, seconds: float) -> None:
        """Ignores it."""

    def step_done(self, stats: StepStats) -> None:
        """Ignores it."""

    def step_failed(self, error: Exception) -> None:
        """Ignores it."""

    def request_done(self, finished: Finished, submitted_at: float, now: float) -> None:
        """Ignores it."""


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """The loop as seen from outside after its latest step."""

    counts: Counts
    waiting_for_adapters: int
    healthy: bool
    """False after several failed steps in a row, until one succeeds."""
    accepting: bool
    """False while draining and after stop()."""
    steps: int
    failed_steps: int
    background: int = 0
    """Live background requests, which the counts include."""
