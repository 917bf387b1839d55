"""Takes jobs off the queue in a thread of its own, so that an idle trainer can be woken by other work as well."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from services.common.consumer import ClaimedJob, JobConsumer
from services.common.errors import Unavailable
from services.trainer.session import JobSession

_CLAIM_SECONDS = 1.0


class JobClaims:
    """One job at a time: the next is claimed once the trainer has asked for it. A claimed job is kept alive from the
    moment it is claimed, however long the trainer is still busy with something else.

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
        self._log = structlog.get_logger("trainer")
        self._thread = threading.Thread(target=self._run, name="claims", daemon=True)

    def start(self) -> None:
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
        away = False
        tidied = False
        while not self._draining.is_set():
            self._wanted.wait()
            if self._draining.is_set():
                return
            try:
                if not tidied:
                    self._consumer.forget_dead_consumers()
                    tidied = True
                claimed = self._consumer.claim(_CLAIM_SECONDS)
                away = False
            except Unavailable as error:
                if not away:
                    away = True
                    self._log.warning("queue.away", error=error.message)
                self._draining.wait(_CLAIM_SECONDS)
                continue
            except Exception:  # a bug must not end the only trainer of this engine
                self._log.exception("claim.failed")
                self._draining.wait(_CLAIM_SECONDS)
                continue
            if claimed is not None:
                session = self._session(claimed)
                session.start()
                self._wanted.clear()
                self._found = claimed, session
                self._wake()
