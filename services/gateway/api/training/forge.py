"""/v1/forge: making a smaller model of the one that the engines serve. A run is a job of kind forge: it is cancelled
and followed as one, by the same id."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Response

from services.common.errors import Conflict, NotFound, TemperError
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import ForgeJob, Job
from services.common.jobs.kinds.forge import STORED
from services.common.queue.job_queue import JobQueue
from services.common.queue.records import spec_sha
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.common.telemetry import tracing
from services.gateway.api.base.idempotency import IdempotencyKey
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.auth.caller import owner, sees
from services.gateway.auth.route_permissions import TRAIN, TRAIN_OR_ADMIN, Permission
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.pool import EnginePool
from services.gateway.protocol.training.forge import DeletedForge, ForgeList, ForgeObject

_KIND: str = ForgeJob.model_fields["kind"].default

routes = Routes("forge")


@dataclass(frozen=True, slots=True)
class ForgeServices:
    """Queue that runs wait in, and the object store that their checkpoints are in."""

    queue: JobQueue
    engines: EnginePool
    objects: ObjectStore
    """It blocks, so it is only called in ``threads``."""
    bucket: str
    threads: StoreThreads


Forge = Annotated[ForgeServices, provided(ForgeServices)]


@routes.post("/v1/forge", Permission(TRAIN, audited=True, idempotent=True), status_code=202)
async def run_forge(
    response: Response, body: ForgeJob, forge: Forge, idempotency_key: IdempotencyKey = None
) -> ForgeObject:
    """Queues a forge run; follow it like a training job.

    Names of suites become versions now. With an Idempotency-Key, sending it again returns the same run.
    """
    sha = await asyncio.to_thread(spec_sha, body)
    job = None if idempotency_key is None else await forge.queue.submitted(idempotency_key, sha, key_id=owner())
    if job is None:
        suites = await forge.threads.run(_pinned, forge, body)
        job = await forge.queue.submit(
            body.model_copy(update={"suites": suites}),
            idempotency_key=idempotency_key,
            request_sha=sha,
            traceparent=tracing.current(),
            key_id=owner(),
        )
    response.headers["location"] = f"/v1/forge/{job.id}"
    return ForgeObject.of(job, "", None)


@routes.get("/v1/forge", Permission(TRAIN_OR_ADMIN))
async def list_forge_runs(
    forge: Forge,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> ForgeList:
    """The caller's runs, newest first; everybody's for an admin. `after` is the last id of the page before."""
    try:
        if after is not None:
            await _found(forge, after)
        whose, unreadable = None if sees(None) else owner(), Unreadable()
        jobs = await forge.queue.list(limit=limit + 1, after=after, kind=_KIND, key_id=whose, pass_over=unreadable)
    except NotFound as error:
        error.param = "after"
        raise
    data = await asyncio.gather(*(_told(forge, job) for job in jobs[:limit]))
    return ForgeList(data=data, has_more=len(jobs) > limit, unreadable=unreadable)


@routes.get("/v1/forge/{run}", Permission(TRAIN_OR_ADMIN))
async def get_forge_run(run: str, forge: Forge) -> ForgeObject:
    """A run with its state and, once it has ended, where its checkpoint is and how good."""
    return await _told(forge, await _found(forge, run))


@routes.delete("/v1/forge/{run}", Permission(TRAIN_OR_ADMIN, audited=True))
async def delete_forge_checkpoint(run: str, forge: Forge) -> DeletedForge:
    """Removes a run's checkpoint, or what a run that failed has left of one. The run stays in the list.

    An administrator may remove that of a run which is not listed any more.
    """
    try:
        job = await _found(forge, run)
    except NotFound:
        if not (sees(None) and await forge.threads.run(_has_files, forge, run)):
            raise
    else:
        if not job.state.terminal:
            raise Conflict(f"run {run} is {job.state}: cancel it first, as the job that it is", param="run")
    await forge.threads.run(_remove, forge, run)
    return DeletedForge(id=run)


async def tidy(forge: ForgeServices) -> int:
    """Removes what runs that are over have left unfinished: one that was killed while it uploaded and is cancelled
    then, or tried too often, is nobody's any more. Returns how many. See Chore.

    Checkpoints that are whole stay, and so does what is of no run: recipes may be told to write below the same prefix.
    """
    removed = 0
    for run in await forge.threads.run(forge.objects.list_dirs, STORED):
        if await _over(forge, run) and not await forge.threads.run(_is_whole, forge, run):
            await forge.threads.run(_remove, forge, run)
            removed += 1
    return removed


async def _over(forge: ForgeServices, run: str) -> bool:
    try:
        job = await forge.queue.get(run)
    except NotFound:
        return False
    return job.kind == _KIND and job.state.terminal


async def _found(forge: ForgeServices, run: str) -> Job:
    """A run that the caller may see. Raises NotFound, also if it is another key's."""
    missing = NotFound(f"no such forge run: {run[:80]!r}", param="run")
    try:
        job = await forge.queue.get(run)
    except NotFound as error:
        raise missing from error
    if job.kind != _KIND or not sees(job.key_id):
        raise missing
    return job


async def _told(forge: ForgeServices, job: Job) -> ForgeObject:
    record = await forge.threads.run(_record, forge, job.id) if job.state.terminal else None
    return ForgeObject.of(job, f"s3://{forge.bucket}/{STORED}{job.id}", record)


def _record(forge: ForgeServices, run: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(forge.objects.get(f"{STORED}{run}/forge.json").data))
    except ObjectNotFound:
        return None


def _is_whole(forge: ForgeServices, run: str) -> bool:
    """The record is written last."""
    return forge.objects.head(f"{STORED}{run}/forge.json") is not None


def _has_files(forge: ForgeServices, run: str) -> bool:
    return bool(forge.objects.list_page(f"{STORED}{run}/", "", 1))


def _remove(forge: ForgeServices, run: str) -> None:
    """The record goes first: what is left if this is broken off is no whole checkpoint."""
    forge.objects.delete(f"{STORED}{run}/forge.json")
    forge.objects.delete_prefix(f"{STORED}{run}/")


def _pinned(forge: ForgeServices, job: ForgeJob) -> list[str]:
    """The job's suites with their versions, each of which an engine may run."""
    store, found = SuiteStore(forge.objects), []
    for place, ref in enumerate(job.suites):
        field = f"suites[{place}]"
        try:
            manifest = store.get(*parse_suite_ref(ref))
        except TemperError as error:
            error.param = field
            raise
        for granted in forge.engines.granted():
            manifest.settings.scorer.check_allowed(f"{field}.scorer", granted)
        found.append(str(manifest.ref))
    return found
