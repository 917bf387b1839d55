"""/v1/fine_tuning/jobs: OpenAI's fine-tuning jobs. Each is a training job, by the same id after the prefix."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Query, Request

from services.common.errors import NotFound
from services.common.jobs import Job
from services.common.jobs.fine_tuning import FineTuning
from services.common.queue.records import text_sha
from services.common.telemetry import tracing
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.queries import metadata_filter, metadata_pairs
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.training.fine_tuning.jobs import prepared
from services.gateway.api.training.fine_tuning.objects import (
    checkpoint_object,
    event_object,
    job_id_of,
    job_object,
    missing,
    place_of,
)
from services.gateway.api.training.submission import cancelled, submitted
from services.gateway.api.training.validation import Training, TrainingServices
from services.gateway.auth.caller import owner, principal_of, sees
from services.gateway.auth.route_permissions import TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.protocol.training.fine_tuning import (
    FineTuningCheckpoints,
    FineTuningEvents,
    FineTuningJob,
    FineTuningJobs,
    FineTuningRequest,
)

routes = Routes("fine-tuning")

After = Annotated[str | None, Query(max_length=128)]
Limit = Annotated[int, Query(ge=1, le=100)]


@routes.post("/v1/fine_tuning/jobs", Permission(TRAIN, audited=True, idempotent=True))
async def create_fine_tuning_job(
    request: Request, body: FineTuningRequest, training: Training, idempotency_key: IdempotencyKey = None
) -> FineTuningJob:
    """Queues a job that learns from an uploaded file. Its result is a version of an adapter of its own, which nothing
    else answers with. With an Idempotency-Key, sending it again returns the same job."""
    sha = text_sha(f"fine_tuning {body.model_dump_json()}")
    job = None
    if idempotency_key is not None:
        job = await training.queue.submitted(idempotency_key, sha, key_id=owner())
    if job is None:
        made = await prepared(training, principal_of(request).id, body)
        job = await submitted(
            training,
            made.spec,
            idempotency_key=idempotency_key,
            request_sha=sha,
            traceparent=tracing.current(),
            key_id=owner(),
            fine_tuning=made.request,
        )
    return _shown(job)


@routes.get("/v1/fine_tuning/jobs", Permission(TRAIN_OR_ADMIN), openapi_extra=metadata_filter("jobs"))
async def list_fine_tuning_jobs(
    request: Request, training: Training, after: After = None, limit: Limit = 20
) -> FineTuningJobs:
    """The caller's fine-tuning jobs, newest first; `after` is the last id of the page before, and `metadata[KEY]=VALUE`
    leaves those that have it."""
    wanted = metadata_pairs(request)

    def where(job: Job) -> bool:
        return job.fine_tuning is not None and wanted.items() <= job.metadata.items()

    place = None if after is None else (await _found(training, after, "after")).id
    whose = None if sees(None) else owner()
    unreadable = Unreadable()
    found = await training.queue.list(limit=limit + 1, after=place, key_id=whose, where=where, pass_over=unreadable)
    data = [_shown(job) for job in found[:limit]]
    return FineTuningJobs(data=data, has_more=len(found) > limit, unreadable=unreadable)


@routes.get("/v1/fine_tuning/jobs/{fine_tuning_job_id}", Permission(TRAIN_OR_ADMIN))
async def get_fine_tuning_job(fine_tuning_job_id: str, training: Training) -> FineTuningJob:
    """One job."""
    return _shown(await _found(training, fine_tuning_job_id))


@routes.post("/v1/fine_tuning/jobs/{fine_tuning_job_id}/cancel", Permission(TRAIN_OR_ADMIN, audited=True))
async def cancel_fine_tuning_job(fine_tuning_job_id: str, training: Training) -> FineTuningJob:
    """Cancels a queued job at once, a running one at its next step."""
    return _shown(await cancelled(training, await _found(training, fine_tuning_job_id)))


@routes.post("/v1/fine_tuning/jobs/{fine_tuning_job_id}/pause", Permission(TRAIN_OR_ADMIN, audited=True))
async def pause_fine_tuning_job(fine_tuning_job_id: str, training: Training) -> FineTuningJob:
    """Pauses a queued job at once, a running one at its next step, with a checkpoint."""
    job = await _found(training, fine_tuning_job_id)
    return _shown(await training.queue.pause(job.id))


@routes.post("/v1/fine_tuning/jobs/{fine_tuning_job_id}/resume", Permission(TRAIN_OR_ADMIN, audited=True))
async def resume_fine_tuning_job(fine_tuning_job_id: str, training: Training) -> FineTuningJob:
    """Puts a paused job back into the queue, to go on from its checkpoint."""
    job = await _found(training, fine_tuning_job_id)
    return _shown(await training.queue.resume(job.id))


@routes.get("/v1/fine_tuning/jobs/{fine_tuning_job_id}/events", Permission(TRAIN_OR_ADMIN))
async def list_fine_tuning_events(
    fine_tuning_job_id: str, training: Training, after: After = None, limit: Limit = 20
) -> FineTuningEvents:
    """The job's events with the metrics of each step, newest first."""
    job = await _found(training, fine_tuning_job_id)
    before = None if after is None else place_of(after, job.id)
    found = await training.queue.newest_events(job.id, limit + 1, before)
    return FineTuningEvents(data=[event_object(event, job.id) for event in found[:limit]], has_more=len(found) > limit)


@routes.get("/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints", Permission(TRAIN_OR_ADMIN))
async def list_fine_tuning_checkpoints(
    fine_tuning_job_id: str, training: Training, after: After = None, limit: Limit = 10
) -> FineTuningCheckpoints:
    """Versions of the job that answer requests, newest first: the ends of its last epochs, and its result. Those that
    were deleted are not there any more."""
    job = await _found(training, fine_tuning_job_id)
    made = [one for one in await training.threads.run(training.registry.versions, job.adapter) if one.job_id == job.id]
    found = [checkpoint_object(one, job) for one in reversed(made)]
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise NotFound(f"no such checkpoint of this job: {after[:120]!r}", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    return FineTuningCheckpoints(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > limit,
    )


async def _found(training: TrainingServices, fine_tuning_job_id: str, param: str = "fine_tuning_job_id") -> Job:
    """Job that the caller may see. Raises NotFound: also if it was not made as a fine-tuning job."""
    try:
        job = await training.queue.get(job_id_of(fine_tuning_job_id, param))
    except NotFound as error:
        raise missing(fine_tuning_job_id, param) from error
    if job.fine_tuning is None or not sees(job.key_id):
        raise missing(fine_tuning_job_id, param)
    return job


def _shown(job: Job) -> FineTuningJob:
    return job_object(job, _request(job), time.time())


def _request(job: Job) -> FineTuning:
    if job.fine_tuning is None:
        raise missing(job.id)
    return job.fine_tuning
