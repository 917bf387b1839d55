"""/v1/train: submitting, watching and cancelling jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import Header, Query, Response

from services.common.errors import NotFound, TemperError
from services.common.jobs import JOBS, GrpoJob, Job, JobEvent, JobState, SftJob, TrainingSpec
from services.common.queue.records import spec_sha
from services.common.shutdown import cancel_and_wait
from services.common.telemetry import tracing
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.api.training.rollouts import resolve_examples, resolve_rollouts
from services.gateway.api.training.submission import cancelled, checked, found, submitted
from services.gateway.api.training.validation import Training, TrainingServices
from services.gateway.auth.caller import check_attach, may_attach, owner, sees
from services.gateway.auth.route_permissions import TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.core.errors import payload_of
from services.gateway.core.sse import EventStream, event
from services.gateway.protocol.fields.listing import Listing

routes = Routes("training")


def _submission(model: type[TrainingSpec]) -> Callable[..., Awaitable[dict[str, Any]]]:
    async def submit(
        response: Response, body: Any, training: Training, idempotency_key: IdempotencyKey = None
    ) -> dict[str, Any]:
        return await _submit(training, body, idempotency_key, response)

    # FastAPI reads the schema of the body from this.
    submit.__annotations__["body"] = model
    return submit


async def _submit(
    training: TrainingServices, sent: TrainingSpec, key: str | None, response: Response
) -> dict[str, Any]:
    # The key stands for what was sent. It is looked up before anything that can change in the meantime: the engines
    # forget completions, adapters are deleted, and the answer to a repeated request stays the same.
    sha = await asyncio.to_thread(spec_sha, sent)  # a large job has megabytes
    job = None if key is None else await training.queue.submitted(key, sha, key_id=owner())
    if job is None:
        spec = _attaching(sent)
        if isinstance(spec, GrpoJob):
            spec = await resolve_rollouts(spec, training.engines)
        if isinstance(spec, SftJob):
            spec = await resolve_examples(spec, training.engines)
        spec = await checked(training, spec)
        job = await submitted(
            training, spec, idempotency_key=key, request_sha=sha, traceparent=tracing.current(), key_id=owner()
        )
    response.headers["location"] = f"/v1/train/jobs/{job.id}"
    return job.model_dump(mode="json")


def _attaching(spec: TrainingSpec) -> TrainingSpec:
    """Job with `attach` as the caller may have it. If the job leaves it open, it is what the API key allows.

    Raises:
        Forbidden: the job says that it attaches, and the key may not.
    """
    if not spec.attach or may_attach():
        return spec
    for field in ("attach", "attach_if"):
        if field in spec.model_fields_set:
            check_attach(field)
    return spec.model_copy(update={"attach": False})


def _add_submissions() -> None:
    for kind, model in JOBS.items():
        declare = routes.post(
            f"/v1/train/{kind}",
            Permission(TRAIN, audited=True, idempotent=True),
            status_code=202,
            name=f"submit_{kind}",
            description=f"{model.__doc__}\n\nWith an Idempotency-Key, sending it again returns the same job.",
        )
        declare(_submission(model))


_add_submissions()


@routes.get("/v1/train/jobs", Permission(TRAIN_OR_ADMIN))
async def list_jobs(
    training: Training,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=64)] = None,
    state: JobState | None = None,
    adapter: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """The caller's jobs, newest first; everybody's for an admin. `after` is the last id of the page before."""
    try:
        if after is not None:
            await found(training, after)
        whose, unreadable = None if sees(None) else owner(), Unreadable()
        jobs = await training.queue.list(
            limit=limit, after=after, state=state, adapter=adapter, key_id=whose, pass_over=unreadable
        )
    except NotFound as error:
        error.param = "after"
        raise
    shown = {"object": "list", "data": [job.model_dump(mode="json") for job in jobs]}
    return shown | Listing(unreadable=unreadable).model_dump(mode="json")


@routes.get("/v1/train/jobs/{job_id}", Permission(TRAIN_OR_ADMIN))
async def get_job(job_id: str, training: Training) -> Job:
    """One job with its state, progress and newest metrics."""
    return await found(training, job_id)


@routes.post("/v1/train/jobs/{job_id}/cancel", Permission(TRAIN_OR_ADMIN, audited=True))
async def cancel_job(job_id: str, training: Training) -> Job:
    """Cancels a queued job at once, a running one at its next step."""
    return await cancelled(training, await found(training, job_id))


@routes.post("/v1/train/jobs/{job_id}/pause", Permission(TRAIN_OR_ADMIN, audited=True))
async def pause_job(job_id: str, training: Training) -> Job:
    """Keeps a queued job from being begun; has a running one stop at its next step, with a checkpoint, and leave the
    engine to others. Later jobs of its adapter wait for it."""
    await found(training, job_id)
    return await training.queue.pause(job_id)


@routes.post("/v1/train/jobs/{job_id}/resume", Permission(TRAIN_OR_ADMIN, audited=True))
async def resume_job(job_id: str, training: Training) -> Job:
    """Puts a paused job back into the queue, to go on from its checkpoint."""
    await found(training, job_id)
    return await training.queue.resume(job_id)


@routes.get("/v1/train/jobs/{job_id}/events", Permission(TRAIN_OR_ADMIN), response_class=Response)
async def follow_job(
    job_id: str,
    training: Training,
    last_event_id: Annotated[str | None, Header(max_length=64, pattern=r"^(0|[0-9]+-[0-9]+)?$")] = None,
) -> Response:
    """The job's events as SSE: those after Last-Event-ID (all without it), then new ones until the job has ended."""
    await found(training, job_id)  # a missing job is a 404 only before the stream begins
    events = training.queue.events(job_id, last_event_id or None)
    return EventStream(_follow(training, events), keep_alive=training.settings.keep_alive_seconds)


async def _follow(training: TrainingServices, events: AsyncIterator[JobEvent]) -> AsyncGenerator[bytes, None]:
    stopping = asyncio.ensure_future(training.lifecycle.closing.wait())
    upcoming: asyncio.Future[JobEvent | None] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(_next(events))
            await asyncio.wait((upcoming, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                return  # the client connects again, with the id of the last event it has
            entry = upcoming.result()
            if entry is None:
                return
            yield event(entry.model_dump(mode="json"), name=entry.kind, event_id=entry.id)
    except TemperError as error:
        yield event(payload_of(error), name="error")
    finally:
        stopping.cancel()
        if upcoming is not None:
            await cancel_and_wait(upcoming)
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _next(events: AsyncIterator[JobEvent]) -> JobEvent | None:
    return await anext(events, None)
