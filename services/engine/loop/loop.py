"""Engine loop: one thread that owns the scheduler and runs its steps.

All calls from outside come in through one queue and are done between two steps (between their planning, if they
overlap). So adapter flips, aborts and new requests never race with a plan. Each sink gets its updates once a step. An
idle loop sleeps on the queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import structlog

from services.common.errors import Overloaded, TemperError, Unavailable
from services.engine.compute_sharing.engine_gate import EngineGate
from services.engine.executors.runner import Runner
from services.engine.loop.request_tracker import AdapterResolver, RequestTracker
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EventStream
from services.engine.observability.status import LiveRequest, LoopStatus
from services.engine.requests.submission import Sink, Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

_FAILURES_UNTIL_UNHEALTHY = 3
_STALL_SECONDS = 0.005
"""Poll interval while all requests wait for a tier, which bounds how late a load is given up."""
_QUIET_SECONDS = 0.2
"""Idle time before the integrity check, which takes tens of milliseconds for 100,000 blocks."""


class EngineLoop:
    """Engine loop: continuous batching on a thread of its own. All public methods are thread-safe.

    Args:
        config: configuration of the scheduler.
        runner: executes plans; used on the loop thread only.
        resolver: pins adapter versions; used on the loop thread only.
        gate: compute gate that shares the device with the trainer.
        rollouts: buffer for finished completions whose submission has ``keep_rollout``.
        max_waiting: most requests that wait for their first step; more are refused.
        adapter_wait_seconds: longest wait of a request for its adapter.
        events: stream for the events of steps and requests.
        clock: monotonic seconds; deadlines are on this clock.
        tiers: offload below the device, which calls ``wake``; None: there is none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        resolver: AdapterResolver,
        gate: EngineGate,
        rollouts: RolloutBuffer,
        *,
        max_waiting: int = 256,
        adapter_wait_seconds: float = 30.0,
        events: EventStream | None = None,
        clock: Callable[[], float] = time.monotonic,
        tiers: TierManager | None = None,
    ) -> None:
        self.config = config
        self.rollouts = rollouts
        self._gate = gate
        self._max_waiting = max_waiting
        self._clock = clock
        events = events or EventStream()
        self._pipeline = StepPipeline(config, runner, gate, events, clock, tiers)
        self._tracker = RequestTracker(self._pipeline, resolver, rollouts, events, adapter_wait_seconds, clock)

        # Shared with other threads.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        """Users' submissions that _status does not count yet. The lock guards it, _status, _accepting and _closed."""
        self._accepting = True
        self._closed = False
        self._drained = threading.Event()
        self._status = LoopStatus(self._pipeline.scheduler.counts(), 0, True, True, 0, 0)
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

        self._woken = False
        """True while a wake-up by the tiers is among the commands."""
        self._busy_since: float | None = None
        """Begin of the loop thread's present iteration; None: it waits for work. Written by that thread only."""

        # Used by the loop thread only.
        self._paused_until = 0.0
        self._seen = 0
        """Submissions taken since _status was published."""
        self._stopping = False
        self._checked = False
        """True once the integrity check has run since the last command."""

    # From other threads.

    def start(self) -> None:
        self._thread.start()

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Queues a request; ``sink`` gets its updates, and the last one has a finish reason.

        Raises:
            ValueError: it needs a matcher and has none, or has one and needs none.
            ContextLengthExceeded, InvalidRequest: it can never fit.
            Overloaded: too many requests wait already; never raised for a background request.
            Unavailable: the engine is draining or has stopped.
        """
        if submission.sampling.masked != (submission.matcher is not None):
            raise ValueError(f"{submission.request_id}: a matcher goes with a constraint or a thinking budget")
        self.config.max_output(len(submission.prompt_token_ids), submission.sampling.max_tokens)
        with self._lock:
            self._check_open()
            if not submission.background:
                self._check_room()
                self._queued += 1
            self._commands.put(partial(self._submit, submission, sink, self._clock()))

    def abort(self, request_id: str, keep_tokens: int = 0, on_kept: Sink | None = None) -> None:
        """Ends a request at the next boundary; unknown ids are ignored.

        Args:
            keep_tokens: 0: the client is gone, the last update says ABORT. Otherwise the text ended (at a stop string)
                with this many tokens: the last update says STOP and the rollout is cut to them, also if the request
                has just ended by itself.
            on_kept: sink for an update with ``kept`` when all of this is done.
        """
        self._commands.put(partial(self._tracker.abort, request_id, keep_tokens, on_kept))

    def abort_all(self, sink: Sink) -> None:
        """Ends all requests of a sink, which gets no more updates."""
        self._commands.put(partial(self._tracker.abort_all, sink))

    def call_at_boundary(self, function: Callable[[], _T]) -> Future[_T]:
        """Runs a function on the loop thread between two steps (at once if called there).

        The future gets its result or exception, or Unavailable if the loop has stopped.
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

    def call_with_scheduler(self, function: Callable[[Scheduler], _T]) -> Future[_T]:
        """Runs a function at a boundary with the present scheduler. Events of the tiers are taken in before, and the
        commands that the function gives them are submitted after it."""

        def call() -> _T:
            self._pipeline.serve_tiers()
            result = function(self._pipeline.scheduler)
            self._pipeline.serve_tiers()
            return result

        return self.call_at_boundary(call)

    def retry_adapters(self) -> None:
        """Called by the adapter manager when an adapter is loaded or has failed to load, or a slot is free."""
        self._commands.put(self._mark_retry)

    def wake(self) -> None:
        """Called by the tiers when they have events."""
        if not self._woken:
            self._woken = True
            self._commands.put(self._serve_tiers)

    def pause(self, seconds: float) -> Future[None]:
        """Launches no step from the next boundary on, for so long or until ``resume``. Requests stay as they are, those
        of jobs too, and new ones wait; the trainer goes on. Draining ends it."""

        def begin() -> None:
            self._pipeline.paused = True
            self._paused_until = self._clock() + seconds

        return self.call_at_boundary(begin)

    def resume(self) -> Future[None]:
        """Ends a pause."""
        return self.call_at_boundary(self._resume)

    def status(self) -> LoopStatus:
        return self._status

    def live_requests(self) -> Future[list[LiveRequest]]:
        """Asks at the next boundary for the requests that have not ended; see ``call_at_boundary``."""
        return self.call_at_boundary(self._tracker.live)

    @property
    def alive(self) -> bool:
        """True while the loop's thread runs; part of liveness."""
        return self._thread.is_alive()

    @property
    def stuck_seconds(self) -> float:
        """Seconds that the loop thread has been in its present iteration; 0: it waits for work."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def healthy(self) -> bool:
        """True while the loop is alive and its steps succeed; part of readiness."""
        return self._status.healthy and self._thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for the present ones; False: some are left after ``timeout`` seconds."""
        with self._lock:
            self._accepting = False
            if self._closed:
                return True
            self._commands.put(self._mark_retry)
            self._commands.put(self._resume)
        return self._drained.wait(timeout)

    def stop(self) -> None:
        """Ends all requests with Unavailable, and the thread; returns when it has ended."""
        with self._lock:
            self._accepting = False
            self._commands.put(self._mark_stopping)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if not self._accepting:
            raise Unavailable("the engine is draining or has stopped: use another one")

    def _check_room(self) -> None:
        """Raises Overloaded if too many requests wait. Background requests do not count: they give way to all
        others."""
        counts = self._status.counts
        live = self._queued + counts.waiting + counts.running + self._status.waiting_for_adapters
        waiting = live - self._status.background - self.config.max_num_seqs
        if waiting >= self._max_waiting:
            raise Overloaded(f"{waiting} requests wait already, the limit is {self._max_waiting}: retry later")

    # On the loop thread: the loop.

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._iterate()
                except Exception as error:
                    self._recover(error)
        except Exception as error:
            _log.critical("the engine loop cannot continue and ends", exc_info=error)
        finally:
            self._close()

    def _iterate(self) -> None:
        self._busy_since = self._clock()
        if not self._pipeline.busy:
            self._idle()
        elif self._pipeline.stalled:
            self._await_tiers()
        self._take_commands()
        if self._pipeline.paused and self._clock() >= self._paused_until:
            self._resume()
        self._tracker.retry_loading()
        if self._pipeline.busy and not self._stopping:
            self._tracker.publish(self._pipeline.advance(self._tracker.num_loading))
        self._pipeline.tell_cache()
        self._publish_status()

    def _idle(self) -> None:
        """Sleeps until a command comes in or a request has waited too long for its adapter."""
        self._gate.engine_idle()
        self._publish_status()
        if self._tracker.retry:
            return
        timeout = None if self._checked else _QUIET_SECONDS
        patience = self._tracker.patience()
        if patience is not None:
            timeout = max(0.0, patience if timeout is None else min(timeout, patience))
        self._busy_since = None
        try:
            command = self._commands.get(timeout=timeout)
        except Empty:
            if not self._checked:
                self._pipeline.scheduler.check_integrity()
                self._checked = True
            return
        self._checked = False
        self._busy_since = self._clock()
        command()

    def _await_tiers(self) -> None:
        """Sleeps until a command comes in or a request may have waited long enough for a tier. No step is in flight, so
        the trainer gets the device."""
        self._gate.engine_idle()
        self._busy_since = None
        try:
            command = self._commands.get(timeout=_STALL_SECONDS)
        except Empty:
            command = None
        self._busy_since = self._clock()
        if command is not None:
            command()

    def _serve_tiers(self) -> None:
        self._woken = False
        self._pipeline.serve_tiers()

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _recover(self, error: Exception) -> None:
        """Recovers from a bug outside the model's step: ends all requests and starts again with a new scheduler."""
        _log.critical("engine loop failed, its requests are ended", exc_info=error, requests=len(self._tracker))
        ending = TemperError(f"the engine loop failed ({type(error).__name__})")
        self._tracker.fail_all(self._pipeline.reset(error, ending), ending)

    def _publish_status(self) -> None:
        with self._lock:
            self._queued -= self._seen
            self._seen = 0
            self._status = LoopStatus(
                counts=self._pipeline.scheduler.counts(),
                waiting_for_adapters=self._tracker.num_loading,
                healthy=self._pipeline.failures_in_a_row < _FAILURES_UNTIL_UNHEALTHY,
                accepting=self._accepting,
                steps=self._pipeline.steps,
                failed_steps=self._pipeline.failed_steps,
                background=self._tracker.num_background,
                paused=self._pipeline.paused,
            )
            if not self._accepting and not self._tracker and not self._queued:
                self._drained.set()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._accepting = False
        # No command is queued from here on; those that are must be answered.
        self._take_commands()
        self._pipeline.discard()
        self._tracker.fail_all([], Unavailable("the engine is shutting down"))
        self._gate.engine_idle()
        self._publish_status()

    # On the loop thread: commands.

    def _submit(self, submission: Submission, sink: Sink, submitted_at: float) -> None:
        self._seen += not submission.background
        self._tracker.submit(submission, sink, submitted_at)

    def _call(self, function: Callable[[], _T], future: Future[_T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        # The call may have been an adapter flip.
        self._tracker.retry = True

    def _resume(self) -> None:
        self._pipeline.paused = False

    def _mark_retry(self) -> None:
        self._tracker.retry = True

    def _mark_stopping(self) -> None:
        self._stopping = True
