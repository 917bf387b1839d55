"""A training job as it goes into the queue, with its data and with versions in place of names, and checked; and as it
is found and cancelled there."""

from __future__ import annotations

import asyncio
from typing import Any

from services.common.jobs import Job, JobState, TrainingSpec
from services.gateway.api.training.datasets import with_rows
from services.gateway.api.training.erased_rows import has_erased_rows, withdrawn
from services.gateway.api.training.leftovers import remove_leftovers
from services.gateway.api.training.validation import (
    TrainingServices,
    check_references,
    check_training_job,
    with_versions,
)
from services.gateway.auth.caller import sees


async def checked(training: TrainingServices, spec: TrainingSpec) -> TrainingSpec:
    """The job as it can be queued.

    Raises:
        NotFound, ModelNotFound, AdapterRejected, InvalidRequest: see with_rows, check_references, with_versions and
            check_training_job.
        Unavailable: a store or every engine is away.
    """
    spec = await with_rows(training, spec)
    await check_references(training, spec)
    spec = await with_versions(training, spec)
    async with training.checks:
        await asyncio.to_thread(check_training_job, training.engines.served, spec)
    return spec


async def submitted(training: TrainingServices, spec: TrainingSpec, **options: Any) -> Job:
    """Queues a checked job. It is cancelled if rows of its data set were erased since they were read.

    Args:
        options: see JobQueue.submit, which says what is raised.
    """
    return await without_erased(training, await training.queue.submit(spec, **options))


async def without_erased(training: TrainingServices, job: Job) -> Job:
    """A job that was submitted, cancelled if it has rows that were erased meanwhile.

    Whoever erases cuts data sets first and looks at jobs then; here it is the other way round.
    """
    if job.state.terminal or not await has_erased_rows(training.datasets, training.threads, job):
        return job
    await withdrawn(training.queue, job)
    return await training.queue.get(job.id)


async def found(training: TrainingServices, job_id: str) -> Job:
    """Job that the caller may see. Raises NotFound, also if it is another key's."""
    job = await training.queue.get(job_id)
    if not sees(job.key_id):
        raise training.queue.missing(job_id)
    return job


async def cancelled(training: TrainingServices, job: Job) -> Job:
    """Cancels a job. One that waits with a checkpoint has no owner who would remove it.

    Raises:
        Conflict: see JobQueue.cancel.
    """
    ended = await training.queue.cancel(job.id)
    if ended.state is JobState.CANCELLED and ended.started_at is not None and not job.state.terminal:
        await remove_leftovers(training.threads, training.registry, job)
    return ended
