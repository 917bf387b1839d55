"""/v1/learners: policies by which adapters get better from the traffic, and where each of them stands.

A learner belongs to the API key that made it, learns from the traffic of that key (an administrator's from
everybody's), and its data sets and jobs are that key's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Response

from services.common.errors import Conflict, InvalidRequest, NotFound, TemperError
from services.common.evaluation.suites.names import parse_suite_ref
from services.gateway.api.base.idempotency import Once, json_answer
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.learning.datasets import DatasetServices, built_only, check_readable, name_owner
from services.gateway.api.learning.learner_work import LearnerWork, sources_of
from services.gateway.api.training.validation import TrainingServices
from services.gateway.auth.caller import check_attach, check_name_owner, may_attach, owner, sees
from services.gateway.auth.route_permissions import TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.learning.learners import (
    DeletedLearner,
    LearnerEvents,
    LearnerList,
    LearnerObject,
    LearnerPath,
    LearnerPlan,
)
from services.gateway.settings import GatewaySettings
from services.learning.datasets.convert import examples_of
from services.learning.learners.policy import LearnerName, LearnerPolicy
from services.learning.learners.record import Cycle, EventKind, Learner, NewEvent
from services.learning.learners.store import LearnerStore, NewLearner, missing
from services.learning.learners.trigger import due

routes = Routes("learners")
Changed = tuple[Cycle, Sequence[NewEvent]]


@dataclass(frozen=True, slots=True)
class LearnerServices:
    """Store of learners, and what their cycles are made with."""

    store: LearnerStore
    work: LearnerWork
    datasets: DatasetServices
    training: TrainingServices


def open_learners(settings: GatewaySettings) -> LearnerStore:
    """The store that the settings name."""
    return LearnerStore(settings)


Services = Annotated[LearnerServices, provided(LearnerServices)]


@routes.post(
    "/v1/learners",
    Permission(TRAIN, audited=True, idempotent=True),
    status_code=201,
    response_model=LearnerObject,
)
async def create_learner(body: LearnerPolicy, services: Services, once: Once) -> Any:
    """Makes a learner, whose first cycle begins as its trigger says."""

    async def create() -> LearnerObject:
        return LearnerObject.of(await _create(services, await _allowed(services, body)))

    return await once(create, body=body)


@routes.put(
    "/v1/learners/{name}",
    Permission(TRAIN, audited=True),
    response_model=LearnerObject,
    responses={201: {"model": LearnerObject, "description": "It was made."}},
)
async def apply_learner(name: LearnerPath, body: LearnerPolicy, services: Services) -> Any:
    """Makes a learner, or gives one another policy, which holds from its next step on."""
    if body.name != name:
        raise InvalidRequest(f"the body's name is {body.name!r}, and the path's {name!r}: they are one", param="name")
    policy = await _allowed(services, body)
    try:
        learner = await services.store.get(name)
    except NotFound:
        return json_answer(LearnerObject.of(await _create(services, policy)), 201)
    check_name_owner("learner", name, learner.key_id)
    if learner.policy == policy:
        return LearnerObject.of(learner)

    def change(found: Learner) -> Changed:
        return found.cycle, (_said(found, "changed", "The policy is another one.", {"revision": found.revision + 1}),)

    return LearnerObject.of(await services.store.change(name, change, policy=policy))


async def _allowed(services: LearnerServices, policy: LearnerPolicy) -> LearnerPolicy:
    """The policy as the caller may have it.

    Raises:
        Forbidden: it promotes, and the caller may not; or the name of its data sets is another API key's.
        NotFound: a data set that it mixes in is not there.
        InvalidRequest: no adapter may have the name.
    """
    registry = services.training.registry
    registry.check_new_name(policy.adapter)
    await services.training.threads.run(registry.check_kind, policy.adapter, "adapter")
    await name_owner(services.datasets, policy.name)
    if policy.anchor is not None:
        await check_readable(services.datasets, policy.anchor.dataset, "anchor.dataset")
    for place, mixed in enumerate(policy.data.mix):
        for ref in mixed.datasets:
            await check_readable(services.datasets, ref, f"data.mix[{place}].datasets")
    if policy.canary is not None:
        check_attach("canary")
    elif policy.attach and not may_attach():
        if "attach" in policy.model_fields_set:
            check_attach("attach")
        return policy.model_copy(update={"attach": False})
    return policy


async def _create(services: LearnerServices, policy: LearnerPolicy) -> Learner:
    now = time.time()
    new = NewLearner(policy, owner(), bool(owner()) and sees(None))
    said = NewEvent(kind="collecting", detail="The learner is made.", cycle=0, by=owner() or "anonymous")
    return await services.store.create(new, Cycle(entered_at=now), said)


async def _own(services: LearnerServices, name: str) -> Learner:
    """Raises NotFound: there is none, or it is another API key's."""
    learner = await services.store.get(name)
    if not sees(learner.key_id):
        raise missing(name)
    return learner


@routes.get("/v1/learners", Permission(TRAIN_OR_ADMIN))
async def list_learners(
    services: Services,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: LearnerName | None = None,
) -> LearnerList:
    """The caller's learners by name; everybody's for an admin. `after` is the last id of the page before."""
    unreadable = Unreadable()
    every = await services.store.all(unreadable)
    found = [one for one in every if sees(one.key_id) and (after is None or one.name > after)]
    data = [LearnerObject.of(one) for one in found[:limit]]
    return LearnerList(data=data, has_more=len(found) > limit, unreadable=unreadable)


@routes.get("/v1/learners/{name}", Permission(TRAIN_OR_ADMIN))
async def get_learner(name: LearnerPath, services: Services) -> LearnerObject:
    """A learner with its policy, and where it stands."""
    return LearnerObject.of(await _own(services, name))


@routes.get("/v1/learners/{name}/events", Permission(TRAIN_OR_ADMIN))
async def list_learner_events(
    name: LearnerPath,
    services: Services,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")] = None,
) -> LearnerEvents:
    """What happened, newest first, with its evidence. `after` is the last id of the page before."""
    learner = await _own(services, name)
    found = await services.store.events(learner, limit=limit + 1, after=after)
    return LearnerEvents(data=found[:limit], has_more=len(found) > limit)


@routes.post("/v1/learners/{name}/pause", Permission(TRAIN_OR_ADMIN, audited=True))
async def pause_learner(name: LearnerPath, services: Services) -> LearnerObject:
    """Has a learner begin no further step. A job or a canary that runs goes on."""

    def change(found: Learner) -> Changed | None:
        if found.cycle.paused:
            return None
        return found.cycle.model_copy(update={"paused": True}), (_said(found, "paused", "It is paused."),)

    return await _changed(services, name, change)


@routes.post("/v1/learners/{name}/resume", Permission(TRAIN_OR_ADMIN, audited=True))
async def resume_learner(name: LearnerPath, services: Services) -> LearnerObject:
    """Has a learner that is paused or has stopped go on; one whose cycle failed looks again at once."""

    def change(found: Learner) -> Changed | None:
        cycle = found.cycle
        fresh: dict[str, Any] = {"paused": False, "not_before": 0.0, "faults": 0}
        if cycle.state == "stopped":
            fresh |= {"state": "collecting", "entered_at": time.time(), "refused": 0}
        resumed = cycle.model_copy(update=fresh)
        return None if resumed == cycle else (resumed, (_said(found, "resumed", "It goes on."),))

    return await _changed(services, name, change)


@routes.post("/v1/learners/{name}/run", Permission(TRAIN, audited=True))
async def run_learner(name: LearnerPath, services: Services) -> LearnerObject:
    """Begins a cycle now, whatever the trigger says, within the budget. One that runs stays as it is."""

    def change(found: Learner) -> Changed | None:
        cycle = found.cycle
        if cycle.paused or cycle.state == "stopped":
            raise Conflict(f"learner {name!r} is {found.state}: resume it first", param="name")
        if cycle.asked or cycle.state != "collecting":
            return None
        return cycle.model_copy(update={"asked": True}), ()

    return await _changed(services, name, change)


async def _changed(services: LearnerServices, name: str, change: Any) -> LearnerObject:
    await _own(services, name)
    return LearnerObject.of(await services.store.change(name, change))


def _said(learner: Learner, kind: EventKind, detail: str, evidence: dict[str, Any] | None = None) -> NewEvent:
    by = owner() or "anonymous"
    return NewEvent(kind=kind, detail=detail, cycle=learner.cycle.number, by=by, evidence=evidence or {})


@routes.delete("/v1/learners/{name}", Permission(TRAIN_OR_ADMIN, audited=True))
async def delete_learner(name: LearnerPath, services: Services) -> DeletedLearner:
    """Removes a learner with its events, and cancels its job. Data sets, versions and a canary that runs stay."""
    learner = await _own(services, name)
    await services.store.delete(learner)
    if learner.cycle.state in ("training", "evaluating") and learner.cycle.job is not None:
        with contextlib.suppress(NotFound, Conflict):  # it has ended, or is about to
            await services.training.queue.cancel(learner.cycle.job)
    return DeletedLearner(id=name)


@routes.get("/v1/learners/{name}/plan", Permission(TRAIN_OR_ADMIN))
async def plan_learner(name: LearnerPath, services: Services, response: Response) -> LearnerPlan:
    """Says what a cycle would do if it began now: rows, job, suites and share. Nothing is done."""
    learner = await _own(services, name)
    response.headers["cache-control"] = "no-store"
    now, policy = time.time(), learner.policy
    waiting = await services.work.waiting(learner)
    found = due(learner, waiting, now)
    spec = await services.work.declared(learner, await services.work.known_until(learner, now))
    suites, problems = await _suites(services, policy)
    there = [ref for ref in spec.apart_from if ref in suites]
    built, _ = await built_only(services.datasets, spec.model_copy(update={"apart_from": there}), sources_of(learner))
    learnt = examples_of(policy.method, built.rows["train"])
    if not learnt:
        problems.insert(
            0, f"none of the {len(built.rows['train'])} training rows teaches a job of kind {policy.method}"
        )
    return LearnerPlan(
        learner=name,
        begins=found.now,
        why=found.why,
        waiting=waiting,
        data=spec,
        rows={split: len(rows) for split, rows in built.rows.items()},
        report=built.report,
        examples=len(learnt),
        job=policy.job(name),
        suites=list(suites.values()),
        canary_share=None if policy.canary is None else policy.canary.share,
        problems=problems,
    )


async def _suites(services: LearnerServices, policy: LearnerPolicy) -> tuple[dict[str, str], list[str]]:
    """Suites of the gate and those that the data are apart from, each with its version; and what is wrong with them."""
    found: dict[str, str] = {}
    problems = []
    gate = policy.gate
    judges = [] if gate is None else [*(one.suite for one in gate.gain), *(one.suite for one in gate.no_loss)]
    for name in dict.fromkeys((*judges, *policy.data.apart_from)):
        try:
            manifest = await services.training.threads.run(services.training.suites.get, *parse_suite_ref(name))
            found[name] = str(manifest.ref)
        except TemperError as error:
            problems.append(error.message)
    return found, problems
