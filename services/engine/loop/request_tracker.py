"""Request tracker: requests from submission to last update, with their sinks, adapter pins and updates.

Used by the loop thread only, between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from services.common.errors import DeadlineExceeded, InvalidRequest, TemperError
from services.engine.loop.rollout_buffer import Rollout, RolloutBuffer
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EventStream, RequestDone
from services.engine.observability.status import LiveRequest, Phase
from services.engine.requests.adapter import AdapterChoice, AdapterPin
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.submission import Sink, Submission

if TYPE_CHECKING:
    from services.engine.requests.adapter import PrivateVersion

_log = structlog.get_logger(__name__)


class AdapterResolver(Protocol):
    """Source of adapter pins, called on the loop thread only; no method blocks. services.engine.adapters.manager has
    the one of a pod; benchmarks without adapters have their own."""

    def pin(self, choice: AdapterChoice | PrivateVersion) -> AdapterPin | None:
        """Pins the version that answers a request, until ``release``.

        Returns:
            None while it is loading or waits for a slot; the loop asks again after ``EngineLoop.retry_adapters``
            or a boundary call.

        Raises:
            TemperError: there is no such adapter, or it cannot be loaded.
        """
        ...

    def release(self, pin: AdapterPin) -> None:
        """Releases a pin once its request has ended and no step in flight computes for it any more."""
        ...

    def give_up(self, choice: AdapterChoice | PrivateVersion) -> None:
        """Gives up a choice: no request waits for it any more, and the last one did not get its pin."""
        ...

    def overdue(self, choice: AdapterChoice | PrivateVersion) -> TemperError:
        """Error for a request that has waited for its pin as long as it may."""
        ...


@dataclass(slots=True)
class _Live:
    """Request between its submission and its last update."""

    submission: Submission
    sink: Sink
    submitted_at: float
    pin: AdapterPin | None = None
    """Adapter pin; None while its adapter is loading."""


class RequestTracker:
    """Pins adapters, hands requests to the scheduler and their updates to the sinks.

    Args:
        pipeline: step pipeline whose scheduler gets the requests.
        resolver: pins adapter versions.
        rollouts: buffer for finished completions whose submission has ``keep_rollout``.
        events: stream for the events of ended requests.
        adapter_wait_seconds: longest wait of a request for its adapter to load or for a slot.
        clock: seconds; deadlines are on this clock.
    """

    def __init__(
        self,
        pipeline: StepPipeline,
        resolver: AdapterResolver,
        rollouts: RolloutBuffer,
        events: EventStream,
        adapter_wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._resolver = resolver
        self._rollouts = rollouts
        self._events = events
        self._adapter_wait = adapter_wait_seconds
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._loading: dict[str, None] = {}
        """Requests whose adapter is loading or waits for a slot, oldest first."""
        self._arrivals = 0
        self._background = 0
        self.retry = False
        """True if adapters that were loading may be there now."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_background(self) -> int:
        return self._background

    def live(self) -> list[LiveRequest]:
        """Requests that have not ended, in the order of their submission."""
        now = self._clock()
        return [self._described(live, now) for live in self._live.values()]

    def submit(self, submission: Submission, sink: Sink, submitted_at: float) -> None:
        """Takes a request; its updates, or one with an error, go to ``sink``."""
        name = submission.request_id
        if name in self._live:
            error = InvalidRequest(f"request_id {name!r} is in use", param="request_id")
            self._send(sink, [_failed(name, error)])
            return
        self._live[name] = _Live(submission, sink, submitted_at)
        self._background += submission.background
        self._pin(name)

    def abort(self, name: str, keep_tokens: int, on_kept: Sink | None = None) -> None:
        """Ends a request, or cuts the rollout of one that has ended; see EngineLoop.abort."""
        if name in self._live:
            update = self._pipeline.scheduler.abort(name, keep_tokens)
            # Not in the scheduler: its adapter is loading.
            self.publish([update if update is not None else SequenceUpdate(name, finish_reason=FinishReason.ABORT)])
        elif keep_tokens > 0:
            self._rollouts.cut(name, keep_tokens)
        if on_kept is not None:
            self._send(on_kept, [SequenceUpdate(name, kept=True)])

    def abort_all(self, sink: Sink) -> None:
        """Ends all requests of a sink without an update."""
        for name in [name for name, live in self._live.items() if live.sink == sink]:
            update = self._pipeline.scheduler.abort(name)
            self._end(name, None if update is None else update.finished)

    def fail_all(self, updates: list[SequenceUpdate], ending: TemperError) -> None:
        """Publishes the given last updates, and ends all other requests with an error."""
        ended = {update.request_id for update in updates}
        self.publish([*updates, *(_failed(name, ending) for name in self._live if name not in ended)])

    def publish(self, updates: list[SequenceUpdate]) -> None:
        """Sends each sink its updates, after ended requests were removed."""
        by_sink: dict[Sink, list[SequenceUpdate]] = {}
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            by_sink.setdefault(live.sink, []).append(update)
            if update.finish_reason is not None:
                self._end(update.request_id, update.finished)
        for sink, part in by_sink.items():
            self._send(sink, part)

    # Adapters that load.

    def retry_loading(self) -> None:
        """Asks again for the adapters that were loading, and ends the requests that have waited too long."""
        retry, self.retry = self.retry, False
        if not self._loading:
            return
        if retry:
            refused: set[AdapterChoice | PrivateVersion] = set()
            for name in list(self._loading):
                # A failing sink may have ended the request.
                if name in self._loading and (choice := self._live[name].submission.adapter) not in refused:
                    self._pin(name)
                    if name in self._loading:
                        refused.add(choice)  # other requests for it would get the same answer
        now = self._clock()
        late = [name for name in self._loading if self._loading_until(name) <= now]
        self.publish([_failed(name, self._too_late(name, now)) for name in late])

    def patience(self) -> float | None:
        """Seconds until a request has waited too long for its adapter; None if none waits."""
        if not self._loading:
            return None
        return min(self._loading_until(name) for name in self._loading) - self._clock()

    def _described(self, live: _Live, now: float) -> LiveRequest:
        asked = live.submission
        sequence = self._pipeline.scheduler.find(asked.request_id)
        prompt = len(asked.prompt_token_ids)
        if sequence is None:
            phase = Phase.LOADING
        elif not sequence.slot:
            phase = Phase.WAITING
        else:
            phase = Phase.PREFILL if sequence.computed < prompt else Phase.DECODE
        return LiveRequest(
            asked.request_id,
            asked.owner,
            phase,
            _adapter_name(asked) if live.pin is None else live.pin.version,
            prompt_tokens=prompt,
            cached_tokens=0 if sequence is None else sequence.cached_tokens or 0,
            computed_tokens=0 if sequence is None else min(prompt, sequence.computed),
            output_tokens=0 if sequence is None else len(sequence.output_ids),
            age_seconds=max(0.0, now - live.submitted_at),
            priority=asked.priority,
            background=asked.background,
        )

    def _pin(self, name: str) -> None:
        """Pins the adapter and hands the request to the scheduler, or lets it wait for its adapter."""
        live = self._live[name]
        try:
            live.pin = self._resolver.pin(live.submission.adapter)
            if live.pin is None:
                self._loading.setdefault(name)
                return
            self._loading.pop(name, None)
            self._arrivals += 1
            self._pipeline.scheduler.add(live.submission.pinned(live.pin, self._arrivals))
        except TemperError as error:
            self.publish([_failed(name, error)])
        except Exception as error:
            _log.exception("request could not be scheduled", request=name)
            ending = TemperError(f"the engine could not admit the request ({type(error).__name__})")
            self.publish([_failed(name, ending)])

    def _loading_until(self, name: str) -> float:
        live = self._live[name]
        patience = live.submitted_at + self._adapter_wait
        return patience if live.submission.deadline is None else min(patience, live.submission.deadline)

    def _too_late(self, name: str, now: float) -> TemperError:
        submission = self._live[name].submission
        if submission.deadline is not None and submission.deadline <= now:
            return DeadlineExceeded("the deadline passed while the adapter was loading")
        return self._resolver.overdue(submission.adapter)

    # Ends.

    def _send(self, sink: Sink, updates: list[SequenceUpdate]) -> None:
        try:
            sink(updates)
        except Exception:
            _log.exception("a sink failed; its requests are ended")
            self.abort_all(sink)

    def _end(self, name: str, finished: Finished | None) -> None:
        """Gives up the pin of a request that has ended, remembers its rollout and counts it."""
        live = self._live.pop(name)
        self._background -= live.submission.background
        if name in self._loading:
            del self._loading[name]
            choice = live.submission.adapter
            if all(self._live[other].submission.adapter != choice for other in self._loading):
                self._resolver.give_up(choice)
        if live.pin is not None:
            # Not earlier: a step in flight may still compute a token for it, with the weights in that slot.
            self._pipeline.scheduler.when_landed(partial(self._resolver.release, live.pin))
        if finished is None:
            return
        if live.submission.keep_rollout and finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._rollouts.remember(Rollout.of(finished, live.submission.owner))
        if not live.submission.background:
            self._events.emit(RequestDone(finished, live.submitted_at, self._clock()))


def _adapter_name(asked: Submission) -> str:
    """Adapter as it was asked for; empty: the base, the attached one or a private policy."""
    return str(asked.adapter) if isinstance(asked.adapter, AdapterChoice) else ""


def _failed(name: str, error: TemperError) -> SequenceUpdate:
    return SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=error)
