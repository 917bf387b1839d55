"""A training job as it goes into the queue: with its data and with versions in place of names, and checked."""

from __future__ import annotations

import asyncio

from services.common.jobs import TrainingSpec
from services.gateway.api.training.datasets import with_rows
from services.gateway.api.training.validation import (
    TrainingServices,
    check_references,
    check_training_job,
    with_versions,
)


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
