"""/v1/evaluations: running suites on targets, and reading what came of it. A run is a job of kind eval: it is cancelled
and followed as one, by the same id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Query, Response

from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest, NotFound
from services.common.evaluation.runs.lists import RunList
from services.common.evaluation.runs.plan import plan_run
from services.common.evaluation.runs.records import RunRecord
from services.common.jobs import EvalJob, Job
from services.common.queue.records import spec_sha
from services.common.storage.record_versions import passing_over
from services.common.telemetry import tracing
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.evaluation.services import Evaluation, EvaluationServices
from services.gateway.auth.caller import owner, sees
from services.gateway.auth.route_permissions import TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.evaluation.runs import EvaluationItems, EvaluationList, EvaluationObject
from services.gateway.protocol.models import AdapterPath

_KIND: str = EvalJob.model_fields["kind"].default
RunPath = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9-]+$")]

routes = Routes("evaluation")


@routes.post("/v1/evaluations", Permission(TRAIN, audited=True, idempotent=True), status_code=202)
async def run_evaluation(
    response: Response, body: EvalJob, evaluation: Evaluation, idempotency_key: IdempotencyKey = None
) -> EvaluationObject:
    """Queues a run of suites on targets; follow it like a training job.

    Names of suites and adapters become versions now. With an Idempotency-Key, sending it again returns the same run.
    """
    sha = await asyncio.to_thread(spec_sha, body)
    queue = evaluation.queue
    job = None if idempotency_key is None else await queue.submitted(idempotency_key, sha, key_id=owner())
    if job is None:
        digest = evaluation.engines.served.info.digest
        plan = await evaluation.threads.run(plan_run, body, evaluation.suites, evaluation.registry, digest)
        for granted in evaluation.engines.granted():
            plan.check_allowed(granted)
        job = await queue.submit(
            plan.job,
            idempotency_key=idempotency_key,
            request_sha=sha,
            traceparent=tracing.current(),
            key_id=owner(),
        )
        await evaluation.threads.run(evaluation.runs.all.add, job.id, owner())
    response.headers["location"] = f"/v1/evaluations/{job.id}"
    return EvaluationObject.of(job.id, job, None, None)


@routes.get("/v1/evaluations", Permission(TRAIN_OR_ADMIN))
async def list_evaluations(
    evaluation: Evaluation,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> EvaluationList:
    """The caller's runs, newest first; everybody's for an admin. `after` is the last id of the page before."""
    return await _page(evaluation, evaluation.runs.all, limit, after)


@routes.get("/v1/evaluations/{run}", Permission(TRAIN_OR_ADMIN))
async def get_evaluation(run: RunPath, evaluation: Evaluation) -> EvaluationObject:
    """A run with its state and, once it has ended, the scores of every target and all comparisons of two.

    Of a training job whose gates ask suites, its `evaluation` is the id of the run; `gates` has what they decided."""
    return await found_run(evaluation, run)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """A page of one suite's items, as one target answered them; both by name, the first ones by default."""

    suite: Annotated[str | None, Query(max_length=100)] = None
    target: Annotated[str | None, Query(max_length=2300)] = None
    limit: Annotated[int, Query(ge=1, le=1000)] = 100
    after: Annotated[int, Query(ge=-1, lt=2**53)] = -1

    def places(self, record: RunRecord) -> tuple[int, int]:
        """Numbers of suite and target in a run. Raises InvalidRequest if it has no such."""
        suites, targets = [one.suite for one in record.suites], [one.name for one in record.targets]
        return place_of(suites, self.suite, "suite"), place_of(targets, self.target, "target")


@routes.get("/v1/evaluations/{run}/items", Permission(TRAIN_OR_ADMIN))
async def list_evaluation_items(
    run: RunPath, evaluation: Evaluation, page: Annotated[ItemPage, Depends()]
) -> EvaluationItems:
    """Items with their answers and scores, also of a run that goes on: of one suite and one target, by default the
    first ones. `after` is the last index of the page before."""
    record = await begun_run(evaluation, run)
    place, number = page.places(record)
    first, limit = page.after + 1, page.limit
    items = await evaluation.threads.run(evaluation.runs.items, run, place, number, first, limit + 1)
    return EvaluationItems(
        suite=record.suites[place].suite,
        target=record.targets[number].name,
        data=items[:limit],
        total=record.suites[place].items,
        has_more=len(items) > limit,
    )


@routes.get("/v1/adapters/{name}/versions/{number}/evaluations", Permission(TRAIN_OR_ADMIN))
async def list_version_evaluations(
    name: AdapterPath,
    number: Annotated[int, Path(ge=1, lt=2**53)],
    evaluation: Evaluation,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> EvaluationList:
    """The caller's runs that a version is a target of or that its gates decided by, newest first; everybody's for an
    admin. `after` is the last id of the page before."""
    return await _page(evaluation, evaluation.runs.of_version(AdapterVersion(name, number)), limit, after)


async def _page(evaluation: EvaluationServices, listed: RunList, limit: int, after: str | None) -> EvaluationList:
    whose = None if sees(None) else owner()
    unreadable = Unreadable(own=True)  # the lists are by owner
    data: list[EvaluationObject] = []
    while len(data) <= limit:
        ids = await evaluation.threads.run(listed.newest, whose, after, limit + 1)
        for run in ids:
            try:
                with passing_over(unreadable, run, whose):
                    data.append(await found_run(evaluation, run))
            except NotFound:  # never begun, and its job is forgotten
                await evaluation.threads.run(listed.remove, run, owner())
        if len(ids) <= limit:
            break
        after = ids[-1]
    return EvaluationList(data=data[:limit], has_more=len(data) > limit, unreadable=unreadable)


async def found_run(evaluation: EvaluationServices, run: str) -> EvaluationObject:
    """A run that the caller may see. Raises NotFound, also if it is another key's."""
    record: RunRecord | None = await evaluation.threads.run(evaluation.runs.record, run)
    job: Job | None
    try:
        job = await evaluation.queue.get(run if record is None or record.job is None else record.job)
    except NotFound:  # jobs are forgotten after a while, results are not
        job = None
    known = record is not None or (job is not None and job.kind == _KIND)
    key_id = job.key_id if job is not None else record.key_id if record is not None else None
    if not known or not sees(key_id):
        raise NotFound(f"no such evaluation: {run[:80]!r}", param="run")
    result = None if record is None else await evaluation.threads.run(evaluation.runs.result, run)
    gates = () if record is None or record.job is None else await evaluation.threads.run(evaluation.runs.gates, run)
    return EvaluationObject.of(run, job, record, result, gates)


async def begun_run(evaluation: EvaluationServices, run: str) -> RunRecord:
    """Record of a run that the caller may see.

    Raises:
        NotFound: there is none, or it has not begun.
    """
    await found_run(evaluation, run)
    record = await evaluation.threads.run(evaluation.runs.record, run)
    if record is None:
        raise NotFound(f"evaluation {run} has not begun", param="run")
    return record


def place_of(names: Sequence[str], wanted: str | None, field: str) -> int:
    if wanted is None:
        return 0
    if wanted not in names:
        raise InvalidRequest(f"{field} must be one of the run's: {', '.join(names)}", param=field)
    return names.index(wanted)
