"""Steps of a cycle: collecting → preparing → training → evaluating → canary → promoted, rejected or rolled back.

A step has at most one effect outside, which is done once for the cycle however often it is asked for, and then writes
where the learner stands. So whoever goes on after a process has died begins with the step that it died in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import DeadlineExceeded, NewerSchema, Overloaded, RateLimited, TemperError, Unavailable
from services.common.jobs import Job, JobState
from services.common.jobs.record import NOT_PUBLISHED
from services.common.storage.lease import LeaseLost
from services.learning.canaries.record import CanaryRecord
from services.learning.learners.policy import DAY
from services.learning.learners.record import Cycle, JobTime, Learner, NewEvent, Outcome
from services.learning.learners.trigger import due, tokens_over_budget

TRANSIENT = (Unavailable, Overloaded, RateLimited, DeadlineExceeded, LeaseLost, NewerSchema)
"""Errors after which the same step is tried again, and nothing is told."""
FIRST_WAIT, LONGEST_WAIT = 30.0, 3600.0
"""Seconds until a learner whose cycle has failed looks again; twice as many each time."""
_SOURCES = 50


@dataclass(frozen=True, slots=True)
class CycleData:
    """Data set of a cycle."""

    ref: str
    """"name@n"."""
    evidence: Mapping[str, Any]
    """Digest, rows and report."""


class CycleWork(Protocol):
    """What cycles do outside of the store of learners. Everything but reading is done once for ``Learner.cycle_key``.
    Every method may raise Unavailable; what else it raises is a fault of the policy."""

    async def known_until(self, learner: Learner, now: float) -> float:
        """Unix seconds up to which the requests that were logged can be found, and not before where earlier cycles
        ended. Later feedback is left for the next cycle."""

    async def waiting(self, learner: Learner) -> int:
        """New opinions, and logged requests where the policy takes those, since the last cycle's. Cheap."""

    async def make_data(self, learner: Learner) -> CycleData:
        """Makes the data set of the cycle."""

    async def submit(self, learner: Learner, dataset: str) -> Job:
        """Submits the job of the cycle."""

    async def job(self, job_id: str) -> Job:
        """Raises NotFound."""

    async def cancel(self, job_id: str, reason: str) -> None:
        """Cancels a job, unless it publishes its version by now."""

    async def gates(self, job: Job) -> Sequence[Mapping[str, Any]]:
        """What the job's gates have decided, with the evidence."""

    async def begin_canary(self, learner: Learner, candidate: str) -> CanaryRecord:
        """Begins the canary of the cycle, whose id is ``Learner.canary_id``."""

    async def canary(self, canary_id: str) -> CanaryRecord:
        """Raises NotFound."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a learner stands after a step, and what happened."""

    cycle: Cycle
    events: tuple[NewEvent, ...]


async def next_step(learner: Learner, work: CycleWork, now: float) -> Step | None:
    """Does the next step of a learner; None: there is nothing to do now.

    Args:
        now: unix seconds.

    Raises:
        TRANSIENT: the step is to be done again.
    """
    cycle = learner.cycle
    if cycle.paused or cycle.state == "stopped":
        return None
    try:
        match cycle.state:
            case "collecting":
                return await _collect(learner, work, now)
            case "preparing":
                return await _prepare(learner, work, now)
            case "training" | "evaluating":
                return await _train(learner, work, now)
            case _:
                return await _try(learner, work, now)
    except TRANSIENT:
        raise
    except TemperError as error:
        return failed(learner, now, error.message, {"code": error.code, "param": error.param})


async def _collect(learner: Learner, work: CycleWork, now: float) -> Step | None:
    waiting = await work.waiting(learner)
    found = due(learner, waiting, now)
    if not found.now:
        return None
    number, until = learner.cycle.number + 1, await work.known_until(learner, now)
    nothing = {"dataset": None, "job": None, "candidate": None, "canary": None}
    cycle = _in(learner, "preparing", now, number=number, began_at=now, data_until=until, asked=False, **nothing)
    evidence = {"waiting": waiting, "since": learner.cycle.until, "until": until, "revision": learner.revision}
    return Step(cycle, (_event("preparing", number, f"Cycle {number} begins: {found.why}.", evidence),))


async def _prepare(learner: Learner, work: CycleWork, now: float) -> Step:
    cycle = learner.cycle
    if cycle.dataset is None:
        data = await work.make_data(learner)
        changed = cycle.model_copy(update={"dataset": data.ref})
        said = _event("data", cycle.number, f"{data.ref} is made.", {"dataset": data.ref, **data.evidence})
        return Step(changed, (said,))
    job = await work.submit(learner, cycle.dataset)
    jobs = (*(one for one in cycle.jobs if one.began_at > now - DAY), JobTime(began_at=job.created_at))
    said = _event("training", cycle.number, f"{job.id} learns from {cycle.dataset}.", {"job": job.id})
    return Step(_in(learner, "training", now, job=job.id, jobs=jobs), (said,))


async def _train(learner: Learner, work: CycleWork, now: float) -> Step | None:
    cycle = learner.cycle
    job = await work.job(cycle.job or "")
    evidence: dict[str, Any]
    if not job.state.terminal:
        if not job.cancel_requested and (over := tokens_over_budget(learner, _tokens(job), now)) is not None:
            await work.cancel(job.id, over)
            return None
        if job.evaluation is None or cycle.state == "evaluating":
            return None
        evidence = {"job": job.id, "evaluation": job.evaluation, "metrics": job.metrics}
        said = _event("evaluating", cycle.number, f"{job.id} has trained, and its gate decides.", evidence)
        return Step(_in(learner, "evaluating", now), (said,))
    evidence = {"job": job.id, "evaluation": job.evaluation, "metrics": job.metrics, "gates": await work.gates(job)}
    learner = _with_spent(learner, job)
    if job.state is not JobState.SUCCEEDED or job.result_adapter is None:
        reason = job.reason or f"{job.id} was {job.state}"
        if reason.startswith(NOT_PUBLISHED):
            return _ended(learner, now, "rejected", f"The gate has rejected the candidate: {reason}.", evidence)
        return failed(learner, now, reason, evidence)
    candidate = job.result_adapter
    evidence["candidate"] = candidate
    near = _distance(evidence["gates"])
    if learner.policy.canary is None:
        learner = _with(learner, candidate=candidate)
        return _ended(learner, now, "promoted", f"{candidate} has passed{near} and is current.", evidence)
    said = _event("canary", cycle.number, f"{candidate} has passed{near} and is tried on the traffic.", evidence)
    return Step(_in(learner, "canary", now, candidate=candidate), (said,))


def _distance(gates: Sequence[Mapping[str, Any]]) -> str:
    """How far a candidate is from the version before it, where a gate bounds that."""
    found = [gate["divergence"] for gate in gates if gate.get("divergence") is not None]
    return f" (KL {found[0]['kl']:.3g} a token from the version before)" if found else ""


async def _try(learner: Learner, work: CycleWork, now: float) -> Step | None:
    cycle = learner.cycle
    candidate = cycle.candidate or ""
    if cycle.canary is None:
        begun = await work.begin_canary(learner, candidate)
        evidence: dict[str, Any] = {"canary": begun.id, "current": begun.current, "candidate": candidate}
        said = _event("canary", cycle.number, f"{begun.id} compares {candidate} with {begun.current}.", evidence)
        return Step(cycle.model_copy(update={"canary": begun.id}), (said,))
    canary = await work.canary(cycle.canary)
    if not canary.ended:
        return None
    evidence = {"canary": canary.id, "candidate": candidate, "job": cycle.job}
    evidence |= {name: None if part is None else part.model_dump(mode="json") for name, part in _decided(canary)}
    why = "" if canary.decision is None else f": {canary.decision.detail}"
    outcomes: Mapping[str, tuple[Outcome, str]] = {
        "promoted": ("promoted", f"{candidate} is better and current{why}"),
        "rolled_back": ("rolled_back", f"{candidate} is rolled back{why}"),
        "superseded": ("superseded", f"The canary of {candidate} has ended without a decision{why}"),
    }
    return _ended(learner, now, *outcomes[canary.state], evidence)


def _decided(canary: CanaryRecord) -> tuple[tuple[str, Any], ...]:
    return (("decision", canary.decision), ("look", canary.evidence))


# Ends of a cycle.


def _ended(learner: Learner, now: float, outcome: Outcome, detail: str, evidence: Mapping[str, Any]) -> Step:
    """The candidate has been decided on; what it was taught is not taught as new again."""
    cycle, policy = learner.cycle, learner.policy
    against = outcome in ("rejected", "rolled_back")
    refused = cycle.refused + 1 if against else 0 if outcome == "promoted" else cycle.refused
    stops = refused >= policy.stop_after
    # What was refused is not learnt again among later rows: it may be why.
    made = (cycle.dataset,) if outcome == "promoted" and cycle.dataset is not None else ()
    changed = _in(
        learner,
        "stopped" if stops else "collecting",
        now,
        outcome=outcome,
        refused=refused,
        faults=0,
        not_before=0.0,
        until=cycle.data_until,
        promoted=cycle.candidate if outcome == "promoted" else cycle.promoted,
        datasets=(*(one for one in cycle.datasets if one not in made), *made)[-_SOURCES:],
    )
    events = [_event(outcome, cycle.number, detail, evidence)]
    if stops:
        reason = f"{refused} candidates in a row were rejected or rolled back: look at why, and resume it."
        events.append(_event("stopped", cycle.number, reason, {"refused": refused}))
    return Step(changed, tuple(events))


def failed(learner: Learner, now: float, reason: str, evidence: Mapping[str, Any]) -> Step:
    """A step cannot be done as things are. The next cycle has the same rows, and later ones."""
    cycle = learner.cycle
    wait = min(LONGEST_WAIT, FIRST_WAIT * 2**cycle.faults)
    changed = _in(learner, "collecting", now, outcome="failed", faults=cycle.faults + 1, not_before=now + wait)
    detail = f"Cycle {cycle.number} has failed while {cycle.state}: {reason}; the next one may begin in {wait:.0f} s."
    return Step(changed, (_event("failed", cycle.number, detail, evidence),))


def _tokens(job: Job) -> int:
    """Tokens that a job has trained on so far."""
    return int(job.metrics.get("num_tokens", 0))


def _with_spent(learner: Learner, job: Job) -> Learner:
    """The learner with what its last job has used of the budget."""
    spent = 0.0 if job.started_at is None else max(0.0, (job.finished_at or job.started_at) - job.started_at)
    *others, last = learner.cycle.jobs
    return _with(learner, jobs=(*others, last.model_copy(update={"seconds": spent, "tokens": _tokens(job)})))


def _with(learner: Learner, **fields: Any) -> Learner:
    return learner.model_copy(update={"cycle": learner.cycle.model_copy(update=fields)})


def _in(learner: Learner, state: str, now: float, **fields: Any) -> Cycle:
    return learner.cycle.model_copy(update={"state": state, "entered_at": now, **fields})


def _event(kind: Any, cycle: int, detail: str, evidence: Mapping[str, Any]) -> NewEvent:
    return NewEvent(kind=kind, detail=detail, cycle=cycle, evidence=dict(evidence))
