"""Step pipeline: plans, launches and collects steps, as many at a time as the runner overlaps.

While step N runs, step N+1 is planned and launched. Then the results of N are collected, and the loop's work with them
(publishing, new requests, the plan of N+2) happens while N+1 runs. If a trainer wants the device, the gate is taken for
one step at a time from the next boundary on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from services.common.errors import TemperError
from services.engine.compute_sharing.engine_gate import EngineGate
from services.engine.constraints.masks import NO_MASKS
from services.engine.executors.runner import OpenStep, Runner, StepHandle
from services.engine.kv_cache.cache_journal import CacheCleared
from services.engine.observability.events import CacheChanged, EventStream, StepDone, StepFailed
from services.engine.requests.outputs import SequenceUpdate
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Handle of a step that could not be launched: its failure is reported in turn."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(slots=True)
class _LaunchedStep:
    """Launched step."""

    plan: StepPlan
    handle: StepHandle
    began: float
    """Begin of its planning."""
    launched: float
    open: OpenStep | None = None
    """Handle of a masked step until it has its masks; None otherwise."""
    mask_seconds: float = 0.0


class StepPipeline:
    """Runs the scheduler's steps. Used by the loop thread only.

    Args:
        clock: seconds, the clock of the requests' deadlines.
        tiers: offload below the device; None: there is none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        gate: EngineGate,
        events: EventStream,
        clock: Callable[[], float],
        tiers: TierManager | None = None,
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._runner = runner
        self._gate = gate
        self._events = events
        self._clock = clock
        self._in_flight: deque[_LaunchedStep] = deque()
        """Steps in flight, oldest first; the gate is held while there are any."""
        self._collected = 0.0
        """Time of the latest results."""
        self.scheduler = Scheduler(config, runner.depth, tiers, runner.costs)
        self.stalled = False
        """True if all requests wait for a tier, so that advancing is useless before it sends an event, or for the end
        of a pause."""
        self.paused = False
        """Whether no further step is launched."""
        self.steps = 0
        self.failed_steps = 0
        self.failures_in_a_row = 0

    @property
    def busy(self) -> bool:
        """True if ``advance`` has something to do."""
        return bool(self._in_flight) or self.scheduler.has_work

    def advance(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        """Launches the next step if one more may be in flight; then collects the oldest, unless one more still may be.

        Args:
            waiting_for_adapters: for the metrics.

        Returns:
            Updates to publish.

        Raises:
            IntegrityError: the scheduler's state is inconsistent; ``reset`` recovers from it.
        """
        began = self._clock()
        depth = 1 if self._gate.contended else self._runner.depth
        plan: StepPlan | None = None
        updates: list[SequenceUpdate] = []
        if not self.paused and len(self._in_flight) < depth and not (self._in_flight and self._in_flight[-1].open):
            plan = self.scheduler.schedule(began)
            updates = self.scheduler.take_expired()
            if plan is not None:
                launched = self._launch(plan, began)
                updates += self._seal_oldest(waiting_for_adapters)
                # A failure is handled now, before anything is planned on top of it.
                while not launched and self._in_flight:
                    updates += self._collect(waiting_for_adapters)
        # Without a plan there is nothing to run before the next results.
        if self._in_flight and (plan is None or len(self._in_flight) >= depth):
            updates += self._collect(waiting_for_adapters)
        self.stalled = plan is None and not self._in_flight and self.scheduler.has_work
        self.serve_tiers()
        return updates

    def serve_tiers(self) -> None:
        """Takes the tiers' events and submits the commands for them, between two steps."""
        if self._tiers is None:
            return
        self._take_tier_events()
        # Everything planned so far has been launched, so their copies run after it.
        commands = self.scheduler.take_commands()
        if commands:
            self._tiers.submit(commands)

    def _take_tier_events(self) -> None:
        """Takes the tiers' events."""
        events = [] if self._tiers is None else self._tiers.take_events()
        if events:
            self.scheduler.take_events(events)

    def discard(self) -> None:
        """Waits for the steps in flight and drops their results."""
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                if step.open is not None:
                    step.open.seal(NO_MASKS)
                step.handle.result()
            except Exception:
                _log.exception("a discarded step failed")
            if not self._in_flight:
                self._gate.release(0.0)
        self.scheduler.discard()

    def reset(self, error: Exception, ending: TemperError) -> list[SequenceUpdate]:
        """Replaces the scheduler after an error outside a step; returns the last updates of its requests.

        Raises:
            IntegrityError: the tiers still copy, so that no memory can be reused.
        """
        self.count_failure(error)
        self.discard()
        updates = self.scheduler.abandon(ending)
        if self._tiers is not None:
            # No copy may write to memory that the new scheduler allocates. The trainer has the device meanwhile.
            self._gate.engine_idle()
            self._tiers.settle()
            self._tiers.take_events()
            self._tiers.resend_all()
        self.scheduler = Scheduler(self._config, self._runner.depth, self._tiers, self._runner.costs)
        if self._config.cache_journal:
            self._events.emit(CacheChanged([CacheCleared()]))
        return updates

    def tell_cache(self) -> None:
        """Emits the changes of the prefix cache since the last call, if somebody follows them."""
        journal = self.scheduler.journal
        if journal is not None and (changes := journal.take()):
            self._events.emit(CacheChanged(changes))

    def count_failure(self, error: Exception) -> None:
        self.failures_in_a_row += 1
        self.failed_steps += 1
        self._events.emit(StepFailed(error))

    def _launch(self, plan: StepPlan, began: float) -> bool:
        if not self._in_flight:
            self._gate.acquire()
        launched = self._clock()
        try:
            with self._gate.launching():
                opened = self._runner.open(plan) if plan.masked else None
                handle = opened or self._runner.launch(plan)
        except Exception as error:
            self._in_flight.append(_LaunchedStep(plan, _FailedLaunch(error), began, launched))
            return False
        self._in_flight.append(_LaunchedStep(plan, handle, began, launched, opened))
        return True

    def _seal_oldest(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        """Gives the oldest step in flight its masks, if it waits for them."""
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.open is None:
            return []
        opened = step.open
        updates: list[SequenceUpdate] = []
        # From here on the step can be collected, even if sealing fails.
        step.open = None
        try:
            drafts = opened.drafts()
            began = self._clock()
            masks, updates = self.scheduler.masks(step.plan, drafts)
            step.mask_seconds = self._clock() - began
            with self._gate.launching():
                opened.seal(masks)
        except Exception as error:
            # Handled now, like the failure of a launch.
            step.handle = _FailedLaunch(error)
            updates += self._collect(waiting_for_adapters)
        return updates

    def _collect(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        """Collects the oldest step, and then gives the next one its masks if it waits for these tokens."""
        updates = self._take_oldest(waiting_for_adapters)
        return updates + self._seal_oldest(waiting_for_adapters)

    def _take_oldest(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        step = self._in_flight.popleft()
        plan, before = step.plan, self._collected
        try:
            try:
                result = step.handle.result()
            finally:
                now = self._collected = self._clock()
                computed = now - max(step.launched, before)
                if not self._in_flight:
                    self._gate.release(computed)
            # First take the tiers' events: a step's snapshot must not be saved behind an entry that was removed
            # meanwhile.
            self._take_tier_events()
            updates = self.scheduler.update(plan, result, now)
        except Exception as error:
            return self._fail(plan, error)
        self.scheduler.measured(plan, computed)
        self.failures_in_a_row = 0
        self.steps += 1
        decodes = plan.num_decode_tokens
        self._events.emit(
            StepDone(
                seconds=now - max(step.began, before),
                compute_seconds=computed,
                decodes=decodes,
                prefill_tokens=plan.num_tokens - decodes,
                counts=self.scheduler.counts(),
                waiting_for_adapters=waiting_for_adapters,
                mask_seconds=step.mask_seconds,
            )
        )
        return updates

    def _fail(self, plan: StepPlan, error: Exception) -> list[SequenceUpdate]:
        requests = [chunk.request.request_id for chunk in plan.chunks]
        _log.error("step failed", requests=requests, tokens=plan.num_tokens, exc_info=error)
        self.count_failure(error)
        return self.scheduler.fail(plan, TemperError(f"the engine step failed ({type(error).__name__})"))
