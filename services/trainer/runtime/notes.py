"""What a job says of itself: its settings and its notes, in its record and among its events."""

from __future__ import annotations

from collections.abc import Mapping

from services.trainer.jobs.base import JobRun
from services.trainer.runtime.job_link import JobSession


class Notes:
    """Notes of one attempt, from the first one on."""

    def __init__(self, session: JobSession, run: JobRun) -> None:
        self._session = session
        self._run = run
        self._notes: list[str] = []

    def tell(self, *notes: str | None) -> None:
        """Adds what there is to say: an event each, and all of them in the record once `record` is called."""
        for note in notes:
            if note is not None:
                self._notes.append(note)
                self._session.event("log", {"message": note, "note": True})

    def record(self, metrics: Mapping[str, float]) -> None:
        """Writes the settings, all notes so far and these metrics into the job's record."""
        self._session.describe(self._run.settings, self._notes, metrics)
