"""Controller of learners: of all gateways, the one that holds the lease does the steps of every learner."""

from __future__ import annotations

import asyncio
import time

import structlog

from services.common.errors import Conflict, NotFound, TemperError
from services.common.shutdown import cancel_and_wait
from services.common.storage.lease import LeaseLost
from services.common.storage.repeated import repeat
from services.gateway.core.learner_metrics import LearnerMetrics
from services.learning.learners.record import Learner, NewEvent
from services.learning.learners.steps import TRANSIENT, CycleWork, Step, failed, next_step
from services.learning.learners.store import LEASE_SECONDS, LearnerStore

_EVERY_SECONDS = 1.0
_IN_A_ROW = 8
"""Most steps of a learner without a pause."""

log = structlog.get_logger("learners")


class LearnerController:
    """Does what learners are to do, for as long as it holds the lease. One in a gateway; others stand by.

    A step may take minutes, and the lease is renewed beside it. What a step writes is refused once somebody else has
    taken over, so that a controller which was stopped for a while does no harm.
    """

    def __init__(self, store: LearnerStore, work: CycleWork, metrics: LearnerMetrics) -> None:
        self._store = store
        self._work = work
        self._metrics = metrics
        self._lease = store.lease()
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._fence: int | None = None

    def start(self) -> None:
        """Begins to wish for the lease."""
        self._task = asyncio.create_task(repeat(self.once, min(_EVERY_SECONDS, LEASE_SECONDS / 4), log, "learners"))

    async def stop(self) -> None:
        """Gives the lease back at once: what a step has begun, the next holder goes on with."""
        if self._task is not None:
            await cancel_and_wait(self._task, again_seconds=1.0)
        await self._drop()
        try:
            await self._lease.release()
        except TemperError as error:
            log.warning("lease.kept", error=error.message)

    async def once(self) -> None:
        """Renews the lease, and begins a step of each learner that has none running."""
        fence = await self._lease.hold()
        if fence != self._fence:
            await self._drop()  # what runs is of another lease
            self._fence = fence
        if fence is None:
            return
        learners = await self._store.all()
        self._metrics.show(learners)
        for learner in learners:
            running = self._steps.get(learner.id)
            if running is None or running.done():
                self._steps[learner.id] = asyncio.create_task(self._steps_of(learner, fence))
        known = {learner.id for learner in learners}
        self._steps = {one: task for one, task in self._steps.items() if one in known or not task.done()}

    async def settled(self) -> None:
        """Waits for the steps that run."""
        await asyncio.gather(*self._steps.values())

    async def _drop(self) -> None:
        for task in self._steps.values():
            await cancel_and_wait(task, again_seconds=1.0)
        self._steps.clear()
        self._metrics.show([])

    async def _steps_of(self, learner: Learner, fence: int) -> None:
        note = log.bind(learner=learner.name)
        try:
            self._metrics.waiting(learner, await self._work.waiting(learner))
            for _ in range(_IN_A_ROW):
                step = await self._step(learner)
                if step is None:
                    return
                learner = await self._store.write(learner, step.cycle, step.events, fence=fence)
                for event in step.events:
                    self._tell(learner, event)
        except LeaseLost as error:
            note.warning("lease.lost", error=error.message)
        except (Conflict, NotFound):  # somebody has changed or deleted it: it is read again
            return
        except TRANSIENT as error:
            note.warning("step.waits", state=learner.cycle.state, error=error.message)
        except Exception:  # a bug in one learner must not end the others
            note.exception("steps.failed", state=learner.cycle.state)

    async def _step(self, learner: Learner) -> Step | None:
        try:
            return await next_step(learner, self._work, time.time())
        except TRANSIENT:
            raise
        except Exception:  # a bug in a step, which would be done again every second
            log.exception("step.failed", learner=learner.name, state=learner.cycle.state)
            return failed(learner, time.time(), "internal error; the log has the details", {})

    def _tell(self, learner: Learner, event: NewEvent) -> None:
        log.info("learner", learner=learner.name, cycle=event.cycle, did=event.kind, detail=event.detail)
        self._metrics.happened(learner, event)
