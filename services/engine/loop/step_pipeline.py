"""Steps in flight: plans, launches and collects them, as many at a time as the runner overlaps.

While step N runs, step N+1 is planned and launched; then the results of N are collected, and what the loop does with
them (publishing, new requests, the plan of N+2) happens while N+1 runs. A trainer that wants the device ends that: from
the next boundary on the gate is taken for one step at a time.
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
from services.engine.observability.events import EventStream, StepDone, StepFailed
from services.engine.requests.outputs import SequenceUpdate
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from services.engine.kv_offload.manager import TierManager

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Stands in for the handle of a step that could not be launched, so that its failure is met in turn."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(slots=True)
class _LaunchedStep:
    """One launched step."""

    plan: StepPlan
    handle: StepHandle
    began: float
    """When its planning began."""
    launched: float
    open: OpenStep | None = None
    """The handle, until its masks are there."""
    mask_seconds: float = 0.0


class StepPipeline:
    """Runs the scheduler's steps. Used by the loop thread only.

    Args:
        clock: seconds, that of the requests' deadlines.
        tiers: what keeps more histories than the device does; None: nothing does.
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
        """Oldest first; the gate is held while there are any."""
        self._collected = 0.0
        """When the latest results came in."""
        self.scheduler = Scheduler(config, runner.depth, tiers)
        self.stalled = False
        """Whether requests wait for nothing but a tier: there is no use in advancing before it tells something."""
        self.steps = 0
        self.failed_steps = 0
        self.failures_in_a_row = 0

    @property
    def busy(self) -> bool:
        """Whether ``advance`` has something to do."""
        return bool(self._in_flight) or self.scheduler.has_work

    def advance(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        """Launches the next step if one more may be in flight; then collects the oldest unless still one more may.

        Args:
            waiting_for_adapters: for the metrics.

        Returns:
            What there is to publish.

        Raises:
            IntegrityError: the books are broken; ``reset`` is the way out.
        """
        began = self._clock()
        depth = 1 if self._gate.contended else self._runner.depth
        plan: StepPlan | None = None
        updates: list[SequenceUpdate] = []
        if len(self._in_flight) < depth and not (self._in_flight and self._in_flight[-1].open):
            plan = self.scheduler.schedule(began)
            updates = self.scheduler.take_expired()
            if plan is not None:
                launched = self._launch(plan, began)
                updates += self._seal_oldest(waiting_for_adapters)
                # A failure is met now, before anything is planned on top of it.
                while not launched and self._in_flight:
                    updates += self._collect(waiting_for_adapters)
        # Without a plan there is nothing to run before the next results.
        if self._in_flight and (plan is None or len(self._in_flight) >= depth):
            updates += self._collect(waiting_for_adapters)
        self.stalled = plan is None and not self._in_flight and self.scheduler.has_work
        self.serve_tiers()
        return updates

    def serve_tiers(self) -> None:
        """Takes in what the tiers have done, and hands them what they are to do; between two steps."""
        if self._tiers is None:
            return
        self._take_tier_events()
        # Everything planned so far has been launched: what they copy stands behind it.
        commands = self.scheduler.take_commands()
        if commands:
            self._tiers.submit(commands)

    def _take_tier_events(self) -> None:
        """Takes in what the tiers have done."""
        events = [] if self._tiers is None else self._tiers.take_events()
        if events:
            self.scheduler.take_events(events)

    def discard(self) -> None:
        """Waits for what is in flight and drops the results."""
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                if step.open is not None:
                    step.open.seal(NO_MASKS)
                step.handle.result()
            except Exception:
                _log.exception("a step that nobody waits for failed")
            if not self._in_flight:
                self._gate.release(0.0)
        self.scheduler.discard()

    def reset(self, error: Exception, ending: TemperError) -> list[SequenceUpdate]:
        """After an error outside a step: clean books; returns the last updates of the requests that it had.

        Raises:
            IntegrityError: the tiers still copy, so that nothing can be handed out again.
        """
        self.count_failure(error)
        self.discard()
        updates = self.scheduler.abandon(ending)
        if self._tiers is not None:
            # Nothing may be written any more to memory that the new books hand out. The device is the trainer's
            # meanwhile.
            self._gate.engine_idle()
            self._tiers.settle()
            self._tiers.take_events()
            self._tiers.resend_all()
        self.scheduler = Scheduler(self._config, self._runner.depth, self._tiers)
        return updates

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
        began = self._clock()
        masks, updates = self.scheduler.masks(step.plan)
        # From here on it can be collected, whatever comes of it.
        step.open = None
        step.mask_seconds = self._clock() - began
        try:
            with self._gate.launching():
                opened.seal(masks)
        except Exception as error:
            # Met now, as that of a launch.
            step.handle = _FailedLaunch(error)
            updates += self._collect(waiting_for_adapters)
        return updates

    def _collect(self, waiting_for_adapters: int) -> list[SequenceUpdate]:
        """Waits for the oldest step; what waits for its tokens is then sealed."""
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
            # What a step leaves is saved behind what the tiers have: not behind what they gave up while it ran.
            self._take_tier_events()
            updates = self.scheduler.update(plan, result, now)
        except Exception as error:
            return self._fail(plan, error)
        self.scheduler.measured(plan, computed)
        self.failures_in_a_row = 0
        self.steps += 1
        decodes = plan.num_decodes + plan.num_verified
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
