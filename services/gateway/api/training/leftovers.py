"""What a job leaves in the object store that has ended without an owner, who would remove it."""

from __future__ import annotations

from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.jobs import Job
from services.common.jobs.record import checkpoints_of
from services.gateway.core.file_store import StoreThreads


async def remove_leftovers(threads: StoreThreads, registry: AdapterRegistry, job: Job) -> None:
    """Removes a job's checkpoints, and the hashes of what it learnt from unless a version came of it. Raises
    Unavailable."""
    await threads.run(registry.store.delete_prefix, checkpoints_of(job.id))
    if job.adapter:
        await threads.run(TrainingHashes(registry).forget, DataSource(adapter=job.adapter, job_id=job.id))
