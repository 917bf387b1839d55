"""Takes jobs off the queue in a thread of its own, so that an idle trainer can be woken by other work as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.common.errors import Unavailable
from services.common.queue.consumer import ClaimedJob, JobConsumer
from services.trainer.runtime.job_link import JobSession

_CLAIM_SECONDS = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """What the trainer has asked for."""

    beside: frozenset[str] | None
    """Kinds of which a job may be claimed beside those that run; None: the next job, of whatever kind."""


class JobClaims:
    """One job at a time: the next is claimed once the trainer has asked for it. A claimed job is kept alive from the
    moment it is claimed, however long the trainer is still busy with something else, for as long as its thread lives:
    that is the one which calls ``start``. When it has died nothing more is claimed, and the claims of the jobs that it
    had run out, so that another trainer takes them over.

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
        self._changed = threading.Condition()
        self._wanted: _Wanted | None = None
        self._found: tuple[ClaimedJob, JobSession] | None = None
        self._owner: threading.Thread | None = None
        self._alive: list[JobSession] = []
        """Sessions of the jobs that were claimed, as far as they have not ended."""
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
        self.want()
        self._thread.start()

    def take(self) -> tuple[ClaimedJob, JobSession] | None:
        """The claimed job with its running session, if there is one. ``want`` asks for the next."""
        found, self._found = self._found, None
        return found

    def want(self) -> None:
        """All jobs that were taken have ended."""
        self._want(_Wanted(None))

    def take_beside(self, kinds: frozenset[str], seconds: float) -> tuple[ClaimedJob, JobSession] | None:
        """A job to run beside those that were taken, if one of these kinds waits now.

        Args:
            seconds: to wait for the queue's answer, by the call that asks it; what is found later comes with a later
                call.
        """
        with self._changed:
            if self._found is None and self._wanted is None:
                self._want(_Wanted(kinds))
                self._changed.wait_for(lambda: self._wanted is None, seconds)
        return self.take()

    def join(self) -> None:
        """Waits for the thread, which ends soon after ``draining`` was set; take() may then still have a job."""
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _want(self, wanted: _Wanted) -> None:
        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()

    def _run(self) -> None:
        while self._owner is not None and self._owner.is_alive():
            if self._draining.is_set():
                return
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None, _CLAIM_SECONDS)
                wanted = self._wanted
            if wanted is not None and not self._draining.is_set():
                self._claim(wanted)
        self._log.critical("the trainer's thread has died: nothing more is claimed")
        for session in self._alive:
            session.close()

    def _claim(self, wanted: _Wanted) -> None:
        """Takes a job off the queue, if there is one soon, or at once where it is to run beside others."""
        found: tuple[ClaimedJob, JobSession] | None = None
        failed = False
        try:
            found = self._next(wanted)
            self._away = False
        except Unavailable as error:
            if not self._away:
                self._away = True
                self._log.warning("queue.away", error=error.message)
            failed = True
        except Exception:  # a bug must not end the only trainer of this engine
            self._log.exception("claim.failed")
            failed = True
        with self._changed:
            if found is not None:
                self._alive = [one for one in self._alive if not one.closed] + [found[1]]
                self._found = found
            if found is not None or (wanted.beside is not None and self._wanted is wanted):
                self._wanted = None
                self._changed.notify_all()
        if found is not None:
            self._wake()
        elif failed:
            self._draining.wait(_CLAIM_SECONDS)

    def _next(self, wanted: _Wanted) -> tuple[ClaimedJob, JobSession] | None:
        if not self._tidied:
            self._consumer.forget_dead_consumers()
            self._tidied = True
        if wanted.beside is None:
            claimed = self._consumer.claim(_CLAIM_SECONDS)
        else:
            claimed = self._consumer.claim_beside(wanted.beside)
        if claimed is None:
            return None
        session = self._session(claimed)
        try:
            session.start()
        except RuntimeError:  # the system gives no thread; another engine may have one
            self._consumer.requeue(claimed, "its engine can start no thread")
            raise
        return claimed, session
