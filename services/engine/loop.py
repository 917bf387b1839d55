"""The engine loop: one thread that owns the scheduler and runs its steps.

Everything from outside comes in through one queue and is done between two steps, so that adapter flips, aborts and
new requests never race with a step. Updates go out once a step and sink. An idle loop sleeps on the queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import structlog

from services.common.errors import DeadlineExceeded, InvalidRequest, Overloaded, TemperError, Unavailable
from services.engine.limits import SchedulerConfig
from services.engine.plan import StepPlan
from services.engine.ports import (
    AdapterResolver,
    EngineGate,
    LoopObserver,
    LoopStatus,
    NoObserver,
    Runner,
    Sink,
    StepStats,
    Submission,
)
from services.engine.request import AdapterPin, FinishReason
from services.engine.rollouts import Rollout, RolloutMemory
from services.engine.scheduler import Scheduler
from services.engine.updates import Finished, SequenceUpdate

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

_FAILURES_UNTIL_UNHEALTHY = 3
_QUIET_SECONDS = 0.2
"""How long nothing happens before the books are checked, which takes tens of milliseconds for 100,000 blocks."""


@dataclass(slots=True)
class _Live:
    """A request between its submission and its last update."""

    submission: Submission
    sink: Sink
    submitted_at: float
    pin: AdapterPin | None = None
    """None while its adapter is loading."""


class EngineLoop:
    """Continuous batching as a thread. All public methods are thread-safe.

    Args:
        config: limits of the scheduler.
        runner: executes plans; used on the loop thread only.
        resolver: pins adapter versions; used on the loop thread only.
        gate: shares the device with the trainer.
        rollouts: where finished completions go whose submission says ``keep_rollout``.
        max_waiting: requests that may wait for their first step; more are refused.
        adapter_wait_seconds: how long a request waits for its adapter to load.
        observer: gets the metrics.
        clock: monotonic seconds; deadlines are on it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        resolver: AdapterResolver,
        gate: EngineGate,
        rollouts: RolloutMemory,
        *,
        max_waiting: int = 256,
        adapter_wait_seconds: float = 30.0,
        observer: LoopObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.rollouts = rollouts
        self._scheduler = Scheduler(config)
        self._runner = runner
        self._resolver = resolver
        self._gate = gate
        self._observer = observer if observer is not None else NoObserver()
        self._max_waiting = max_waiting
        self._adapter_wait = adapter_wait_seconds
        self._clock = clock

        # Shared with other threads.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        """Submissions that _status does not count yet; with _status, _accepting and _closed under the lock."""
        self._accepting = True
        self._closed = False
        self._drained = threading.Event()
        self._status = LoopStatus(self._scheduler.counts(), 0, True, True, 0, 0)
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

        # Of the loop thread alone.
        self._live: dict[str, _Live] = {}
        self._loading: list[str] = []
        """Requests whose adapter is loading, oldest first."""
        self._retry_loading = False
        self._seen = 0
        """Submissions that came in since _status was published."""
        self._arrivals = 0
        self._stopping = False
        self._checked = False
        """Whether the books were checked since something last came in."""
        self._failures_in_a_row = 0
        self._steps = 0
        self._failed_steps = 0

    # From other threads.

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Queues a request; ``sink`` gets its updates, the last of which has a finish reason.

        Raises:
            ContextLengthExceeded, InvalidRequest: it can never fit.
            Overloaded: too many requests wait already.
            Unavailable: the engine is draining or has stopped.
        """
        self.config.max_output(len(submission.prompt_token_ids), submission.sampling.max_tokens)
        with self._lock:
            self._check_open()
            counts = self._status.counts
            waiting = self._queued + counts.waiting + self._status.waiting_for_adapters
            if waiting >= self._max_waiting + max(0, self.config.max_num_seqs - counts.running):
                raise Overloaded(f"{waiting} requests wait already, the limit is {self._max_waiting}: retry later")
            self._queued += 1
            self._commands.put(partial(self._submit, submission, sink, self._clock()))

    def abort(self, request_id: str, keep_tokens: int = 0) -> None:
        """Ends a request at the next boundary; unknown ids are ignored.

        Args:
            keep_tokens: 0: the client is gone, the last update says ABORT. Otherwise the text ended (at a stop string)
                with this many tokens: the last update says STOP and the rollout is cut to them, also if the request
                has just ended by itself.
        """
        self._commands.put(partial(self._abort, request_id, keep_tokens))

    def abort_all(self, sink: Sink) -> None:
        """Ends all requests of a sink that is gone; it gets no more updates."""
        self._commands.put(partial(self._abort_all, sink))

    def call_at_boundary(self, function: Callable[[], _T]) -> Future[_T]:
        """Runs a function on the loop thread between two steps (at once if called there).

        The future has its result or exception; Unavailable if the loop has stopped.
        """
        future: Future[_T] = Future()
        call = partial(self._call, function, future)
        if threading.current_thread() is self._thread:
            call()
            return future
        with self._lock:
            if self._closed:
                future.set_exception(Unavailable("the engine has stopped"))
            else:
                self._commands.put(call)
        return future

    def retry_adapters(self) -> None:
        """Told by the adapter manager when an adapter is loaded, has failed to load, or a slot is free."""
        self._commands.put(self._mark_retry)

    def status(self) -> LoopStatus:
        return self._status

    @property
    def alive(self) -> bool:
        """Whether the loop's thread runs; what liveness asks."""
        return self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Whether the loop is alive and its steps succeed; what readiness asks."""
        return self._status.healthy and self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for the present ones; False if some are left after ``timeout`` seconds."""
        with self._lock:
            self._accepting = False
            if self._closed:
                return True
            self._commands.put(self._mark_retry)
        return self._drained.wait(timeout)

    def stop(self) -> None:
        """Ends all requests with Unavailable and the thread; returns when it is gone."""
        with self._lock:
            self._accepting = False
            self._commands.put(self._mark_stopping)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if not self._accepting:
            raise Unavailable("the engine is draining or has stopped: use another one")

    # On the loop thread: the loop.

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._iterate()
                except Exception as error:
                    self._recover(error)
        finally:
            self._close()

    def _iterate(self) -> None:
        if not self._scheduler.has_work:
            self._idle()
        self._take_commands()
        self._admit_loaded()
        if self._scheduler.has_work and not self._stopping:
            self._step()
        self._publish_status()

    def _idle(self) -> None:
        """Sleeps until something comes in or a request has waited too long for its adapter."""
        self._gate.engine_idle()
        self._publish_status()
        if self._retry_loading:
            return
        timeout = None if self._checked else _QUIET_SECONDS
        if self._loading:
            patience = min(self._loading_until(self._live[name]) for name in self._loading) - self._clock()
            timeout = max(0.0, patience if timeout is None else min(timeout, patience))
        try:
            command = self._commands.get(timeout=timeout)
        except Empty:
            if not self._checked:
                self._scheduler.check_integrity()
                self._checked = True
            return
        self._checked = False
        command()

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _step(self) -> None:
        started = self._clock()
        plan = self._scheduler.schedule(started)
        updates = self._scheduler.take_expired()
        if plan is not None:
            updates += self._execute(plan, started)
        self._publish(updates)

    def _execute(self, plan: StepPlan, started: float) -> list[SequenceUpdate]:
        try:
            with self._gate.engine_step():
                computing = self._clock()
                result = self._runner.launch(plan).result()
            now = self._clock()
            updates = self._scheduler.update(plan, result, now)
        except Exception as error:
            return self._fail(plan, error)
        self._failures_in_a_row = 0
        decodes = plan.num_decodes
        self._steps += 1
        self._observer.step_done(
            StepStats(
                seconds=now - started,
                compute_seconds=now - computing,
                decodes=decodes,
                prefill_tokens=plan.num_tokens - decodes,
                counts=self._scheduler.counts(),
                waiting_for_adapters=len(self._loading),
            )
        )
        return updates

    def _fail(self, plan: StepPlan, error: Exception) -> list[SequenceUpdate]:
        requests = [chunk.request.request_id for chunk in plan.chunks]
        _log.exception("step failed", requests=requests, tokens=plan.num_tokens)
        self._count_failure(error)
        return self._scheduler.fail(plan, TemperError(f"the engine step failed ({type(error).__name__})"))

    def _recover(self, error: Exception) -> None:
        """After a bug outside the model's step: ends all requests and starts again with clean books."""
        _log.critical("engine loop failed, its requests are ended", exc_info=error, requests=len(self._live))
        self._count_failure(error)
        ending = TemperError(f"the engine loop failed ({type(error).__name__})")
        updates = self._scheduler.abandon(ending)
        self._scheduler = Scheduler(self.config)
        self._loading = []
        ended = {update.request_id for update in updates}
        updates += [
            SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=ending)
            for name in self._live
            if name not in ended
        ]
        self._publish(updates)

    def _count_failure(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        self._failed_steps += 1
        self._observer.step_failed(error)

    def _publish_status(self) -> None:
        with self._lock:
            self._queued -= self._seen
            self._seen = 0
            self._status = LoopStatus(
                counts=self._scheduler.counts(),
                waiting_for_adapters=len(self._loading),
                healthy=self._failures_in_a_row < _FAILURES_UNTIL_UNHEALTHY,
                accepting=self._accepting,
                steps=self._steps,
                failed_steps=self._failed_steps,
            )
            if not self._accepting and not self._live and not self._queued:
                self._drained.set()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._accepting = False
        # Nothing is queued from here on, but what is must be answered.
        self._take_commands()
        ending = Unavailable("the engine is shutting down")
        self._publish(
            [SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=ending) for name in list(self._live)]
        )
        self._gate.engine_idle()
        self._publish_status()

    # On the loop thread: commands.

    def _submit(self, submission: Submission, sink: Sink, submitted_at: float) -> None:
        self._seen += 1
        name = submission.request_id
        if name in self._live:
            error = InvalidRequest(f"request_id {name!r} is in use", param="request_id")
            self._send(sink, [SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=error)])
            return
        self._live[name] = _Live(submission, sink, submitted_at)
        self._admit(name)

    def _admit(self, name: str) -> bool:
        """Pins the adapter and hands the request to the scheduler; False if the adapter is still loading."""
        live = self._live[name]
        try:
            live.pin = self._resolver.pin(live.submission.adapter)
            if live.pin is None:
                if name not in self._loading:
                    self._loading.append(name)
                return False
            self._arrivals += 1
            self._scheduler.add(live.submission.pinned(live.pin, self._arrivals))
        except TemperError as error:
            self._publish([SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=error)])
        except Exception as error:
            _log.exception("request could not be admitted", request=name)
            ending = TemperError(f"the engine could not admit the request ({type(error).__name__})")
            self._publish([SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=ending)])
        return True

    def _admit_loaded(self) -> None:
        """Asks again for the adapters that were loading, and ends the requests that have waited too long."""
        if not self._loading:
            self._retry_loading = False
            return
        if self._retry_loading:
            self._retry_loading = False
            names, self._loading = self._loading, []
            for name in names:
                # A failing sink may have taken it with it.
                if name in self._live:
                    self._admit(name)
        now = self._clock()
        late = [name for name in self._loading if self._loading_until(self._live[name]) <= now]
        self._publish([self._too_late(name, now) for name in late])

    def _loading_until(self, live: _Live) -> float:
        patience = live.submitted_at + self._adapter_wait
        return patience if live.submission.deadline is None else min(patience, live.submission.deadline)

    def _too_late(self, name: str, now: float) -> SequenceUpdate:
        deadline = self._live[name].submission.deadline
        error: TemperError
        if deadline is not None and deadline <= now:
            error = DeadlineExceeded("the deadline passed while the adapter was loading")
        else:
            error = Unavailable(f"the adapter was not loaded within {self._adapter_wait:g} s: retry later")
        return SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=error)

    def _abort(self, name: str, keep_tokens: int) -> None:
        if name not in self._live:
            if keep_tokens > 0:
                self.rollouts.cut(name, keep_tokens)
            return
        update = self._scheduler.abort(name, keep_tokens)
        # Not in the scheduler: its adapter is loading.
        self._publish([update if update is not None else SequenceUpdate(name, finish_reason=FinishReason.ABORT)])

    def _abort_all(self, sink: Sink) -> None:
        for name in [name for name, live in self._live.items() if live.sink == sink]:
            update = self._scheduler.abort(name)
            self._end(name, None if update is None else update.finished)

    def _call(self, function: Callable[[], _T], future: Future[_T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        # It may have been an adapter flip.
        self._retry_loading = True

    def _mark_retry(self) -> None:
        self._retry_loading = True

    def _mark_stopping(self) -> None:
        self._stopping = True

    # On the loop thread: results.

    def _publish(self, updates: list[SequenceUpdate]) -> None:
        """Gives each sink its updates, after the books of ended requests are closed."""
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

    def _send(self, sink: Sink, updates: list[SequenceUpdate]) -> None:
        try:
            sink(updates)
        except Exception:
            _log.exception("a sink failed, its requests are ended")
            self._abort_all(sink)

    def _end(self, name: str, finished: Finished | None) -> None:
        """Releases the pin of a request that has ended, remembers its rollout and counts it."""
        live = self._live.pop(name)
        if name in self._loading:
            self._loading.remove(name)
        if live.pin is not None:
            self._resolver.release(live.pin)
        if finished is None:
            return
        if live.submission.keep_rollout and finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.rollouts.remember(Rollout.of(finished))
        self._observer.request_done(finished, live.submitted_at, self._clock())
