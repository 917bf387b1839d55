"""Jobs whose data set has lost rows since they were submitted.

A job carries the rows of its data set until it ends. It names the version and its digest, which changes when rows are
taken out: so a job with another digest than its version has rows that are erased, whichever erasure it was, also one
that died before it came to the jobs.
"""

from __future__ import annotations

from services.common.errors import Conflict, NotFound
from services.common.jobs import Job, JobState
from services.common.queue.job_queue import JobQueue
from services.gateway.core.file_store import StoreThreads
from services.gateway.protocol.learning.erasure import JobEnd
from services.learning.datasets.store import DatasetStore, parse_dataset_ref

REASON = "its data set has lost rows to an erasure; submit it again to learn from what is left"


async def has_erased_rows(datasets: DatasetStore, threads: StoreThreads, job: Job) -> bool:
    """True if a job has rows that its data set has no more."""
    if job.dataset is None:
        return False
    try:
        manifest = await threads.run(datasets.get, *parse_dataset_ref(job.dataset))
    except NotFound:
        return True  # nobody can tell whose rows they were
    return manifest.digest != job.dataset_digest


async def withdrawn(queue: JobQueue, job: Job) -> JobEnd | None:
    """Ends a job, and takes its rows out of Redis at once; None: it has ended by itself."""
    try:
        ended = await queue.cancel(job.id, REASON)
    except Conflict:
        return "publishing"
    if not ended.state.terminal:
        return "cancelling"
    return "cancelled" if ended.state is JobState.CANCELLED else None
