"""What an erasure has done to unfinished jobs."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

JobEnd: TypeAlias = Literal["cancelled", "cancelling", "publishing"]
ErasedJobs = Annotated[
    dict[str, JobEnd],
    Field(
        description="Unfinished jobs that had such rows. `cancelled`: at once; `cancelling`: the rows are out of the "
        "queue, and the job ends at its next step; `publishing`: too late to cancel, the rows leave with its end, in "
        "seconds."
    ),
]
