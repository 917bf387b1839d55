"""Takes jobs off the queue in a thread of its own, so that an idle trainer can be woken by other work as well."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from services.common.errors import Unavailable
from services.common.queue.consumer import ClaimedJob, JobConsumer
from services.trainer.runtime.job_link import JobSession

_CLAIM_SECONDS = 1.0


class JobClaims:
    """One job at a time: the next is claimed once the trainer has asked for it. A claimed job is kept alive from the
    moment it is claimed, however long the trainer is still busy with something else, for as long as its thread lives:
    that is the one which calls ``start``. When it has died nothing more is claimed, and the claim of the job that it
    had runs out, so that another trainer takes it over.

    Args:
        session: a claimed job's line to Redis, not started yet.
        draining: set when nothing more is to be claimed.
        wake: called when a job is there.
    """

    def __init__(
        self,
        consumer: JobConsumer,
        session: Callable[[ClaimedJob], JobSession],
        *,
        draining: threading.Event,
        wake: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._session = session
        self._draining = draining
        self._wake = wake
        self._wanted = threading.Event()
        self._found: tuple[ClaimedJob, JobSession] | None = None
        self._owner: threading.Thread | None = None
        self._alive: JobSession | None = None
        """Session of the job that was claimed last."""
        self._tidied = False
        self._away = False
        self._log = structlog.get_logger("trainer")
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether jobs are claimed; they are not any more while the process drains."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begins to claim, for the thread that calls this."""
        self._owner = threading.current_thread()
        self._wanted.set()
        self._thread.start()

    def take(self) -> tuple[ClaimedJob, JobSession] | None:
        """The claimed job with its running session, if there is one. ``want`` asks for the next."""
        found, self._found = self._found, None
        return found

    def want(self) -> None:
        """The job that was taken has ended."""
        self._wanted.set()

    def join(self) -> None:
        """Waits for the thread, which ends soon after ``draining`` was set; take() may then still have a job."""
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while self._owner is not None and self._owner.is_alive():
            if self._draining.is_set():
                return
            if self._wanted.wait(_CLAIM_SECONDS) and not self._draining.is_set():
                self._claim()
        self._log.critical("the trainer's thread has died: nothing more is claimed")
        if self._alive is not None:
            self._alive.close()

    def _claim(self) -> None:
        """Takes a job off the queue, if there is one soon."""
        try:
            if not self._tidied:
                self._consumer.forget_dead_consumers()
                self._tidied = True
            claimed = self._consumer.claim(_CLAIM_SECONDS)
            self._away = False
            if claimed is None:
                return
            session = self._session(claimed)
            session.start()
        except Unavailable as error:
            if not self._away:
                self._away = True
                self._log.warning("queue.away", error=error.message)
            self._draining.wait(_CLAIM_SECONDS)
            return
        except Exception:  # a bug must not end the only trainer of this engine
            self._log.exception("claim.failed")
            self._draining.wait(_CLAIM_SECONDS)
            return
        self._wanted.clear()
        self._alive = session
        self._found = claimed, session
        self._wake()
