"""The sessions of one engine pod: opened, called and closed from any thread; computed by the trainer thread alone.

A call goes through its session's queue, then part by part through `run_next` (the trainer thread) and other threads
for what only waits. One call of a session at a time; sessions take turns.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from pydantic_core import to_json

from services.common.errors import Conflict, Gone, TemperError, Unavailable
from services.common.jobs.training_sessions.calls import (
    CALL,
    Call,
    Forward,
    ForwardBackward,
    OpenSession,
    Sample,
    Save,
    check_tokens,
)
from services.common.jobs.training_sessions.names import future_id, future_session, session_id, session_instance
from services.trainer.host.policy_host import PolicyHost
from services.trainer.memory.kernel_limits import refusal_of
from services.trainer.metrics import TrainerMetrics
from services.trainer.settings import TrainerSettings
from services.trainer.training_sessions import messages
from services.trainer.training_sessions.call_queue import CallQueue, CallState
from services.trainer.training_sessions.driver import Driver, Told, tell
from services.trainer.training_sessions.programs import ResidentSession, call_program, open_program, shape_of
from services.trainer.training_sessions.sampling import checked_prompts
from services.trainer.training_sessions.session import (
    FutureView,
    SessionEnded,
    TrainingSession,
    call_queue_limits,
    describe,
    view_of,
)
from services.trainer.training_sessions.storage import SessionStorage

_TOMBSTONES = 256
"""Ended sessions that are remembered, with why they ended."""


class TrainingSessionManager:
    """Thread-safe. ``run_next`` belongs to the trainer thread.

    Args:
        instance: 12 hex digits, another for each engine process.
        metrics: None: counted, but not exported.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        host: PolicyHost,
        settings: TrainerSettings,
        storage: SessionStorage,
        *,
        instance: str,
        metrics: TrainerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = instance
        self._host = host
        self._settings = settings
        self._storage = storage
        self._clock = clock
        self._metrics = metrics or TrainerMetrics(CollectorRegistry())
        self._lock = threading.RLock()
        self._sessions: dict[str, TrainingSession] = {}
        self._gone: OrderedDict[str, TrainingSession] = OrderedDict()
        self._driver = Driver(self._lock, settings.sessions_max, ended=self._finished, released=self._release)
        self._closed = False
        self._log = structlog.get_logger("sessions")

    # -- from any thread

    def open(self, request: OpenSession, owner: str = "") -> tuple[str, Future[None]]:
        """Begins to open a session: its id, and a future that is done when it can be called.

        Args:
            owner: id of the API key whose it is; empty: there are no keys.

        Raises:
            Overloaded: too many sessions are open here.
            InvalidRequest: ttl_seconds is over the limit.
            Unavailable: this engine shuts down.
        """
        ttl = self._settings.session_ttl_seconds if request.ttl_seconds is None else request.ttl_seconds
        if ttl > self._settings.session_ttl_max_seconds:
            raise messages.too_long_a_life(ttl, self._settings.session_ttl_max_seconds)
        self.sweep()
        with self._lock:
            self._check_open()
            if len(self._sessions) >= self._settings.sessions_max:
                raise messages.full(len(self._sessions), self._settings.sessions_max)
            name = session_id(self.instance, secrets.token_hex(6))
            resident = ResidentSession(
                name, self._host, self._storage, self._settings.served_model_name, shape_of(request, self._host)
            )
            calls: CallQueue[Call] = CallQueue(
                call_queue_limits(self._settings), lambda seq: future_id(name, seq, secrets.token_hex(3)), self._clock
            )
            session = TrainingSession(resident, request, calls, ttl, time.time(), self._clock(), owner)
            session.opened.set_running_or_notify_cancel()  # it cannot be cancelled by whoever waits for it
            self._sessions[name] = session
            told = self._driver.start(session, open_program(resident, request))
        tell(told)
        self._log.info("session.opening", session=name)
        return name, session.opened

    def submit(self, name: str, call_json: bytes) -> FutureView:
        """Puts a call into a session's queue. A repeated one gives the same future.

        Raises:
            InvalidRequest, pydantic.ValidationError: the call is malformed.
            NotFound, Gone: there is no such session, or not any more.
            Conflict, Overloaded: as CallQueue.submit says.
        """
        call = CALL.validate_json(call_json)
        info = self._host.model.config
        check_tokens(
            call,
            vocab_size=info.vocab_size,
            max_train_tokens=self._host.max_train_tokens,
            max_call_tokens=self._settings.session_call_tokens,
        )
        if isinstance(call, Save) and call.name is not None:
            self._storage.check_name(call.name)
        if isinstance(call, Sample):
            checked_prompts(self._host, call)
        digest = hashlib.sha256(to_json(call)).hexdigest()
        tokens = call.num_tokens if isinstance(call, Forward | ForwardBackward) else 0
        self.sweep()
        with self._lock:
            self._check_open()
            session = self._find(name)
            found = session.calls.submit(call.seq, digest, call.kind, call, tokens)
            session.used = self._clock()
            if isinstance(found, str):
                raise self._forgotten(found)
            told = self._start_next(session)
            view = view_of(session, found)
        tell(told)
        return view

    def look(self, future: str) -> FutureView:
        """State of a call, or its result.

        Raises:
            NotFound: no session here has or had it.
            Gone: its result is not kept any more, or its session ended before it did.
        """
        name = future_session(future)
        if name is None:
            raise messages.unknown_future(future)
        self.sweep()
        with self._lock:
            session = self._sessions.get(name) or self._gone.get(name)
            if session is None:
                raise self._missing(name)
            session.used = self._clock()
            entry = session.calls.find(future)
            if entry is not None:
                return view_of(session, entry)
            if session.ended is not None:
                raise Gone(session.ended.message, param="id")
            if session.calls.executed(future):
                raise self._forgotten(future)
            raise messages.unknown_future(future)

    def watch(self, future: str, told: Callable[[], None]) -> bool:
        """Has ``told`` called, by any thread, once the call has ended; False if it has already, or is unknown."""
        name = future_session(future)
        with self._lock:
            session = self._sessions.get(name or "")
            entry = session.calls.find(future) if session is not None else None
            if entry is None or entry.state is not CallState.PENDING:
                return False
            entry.watchers.append(told)
            return True

    def unwatch(self, future: str, told: Callable[[], None]) -> None:
        """The watcher has gone."""
        with self._lock:
            session = self._sessions.get(future_session(future) or "")
            entry = session.calls.find(future) if session is not None else None
            if entry is not None and told in entry.watchers:
                entry.watchers.remove(told)

    def get(self, name: str) -> dict[str, Any]:
        """One session as its client sees it. Raises NotFound, Gone."""
        self.sweep()
        with self._lock:
            session = self._find(name)
            session.used = self._clock()
            return self._described(session)

    def open_sessions(self, owner: str = "") -> list[dict[str, Any]]:
        """An owner's open sessions, oldest first. This keeps none of them alive."""
        self.sweep()
        with self._lock:
            found = [each for each in self._sessions.values() if each.opened.done() and each.owner == owner]
            return [self._described(session) for session in found]

    def check_owner(self, name: str, owner: str) -> None:
        """Raises NotFound if a session, open or ended, is another's."""
        with self._lock:
            session = self._sessions.get(name) or self._gone.get(name)
        if session is not None and session.owner != owner:
            raise messages.unknown_session(name)

    def close(self, name: str) -> None:
        """Ends a session; calls that have not ended fail. Raises NotFound, Gone."""
        with self._lock:
            session = self._find(name)
            lost = Conflict(f"training session {name} was closed before this call had ended", param="id")
            told = self._end(session, Gone(f"training session {name} was closed", param="id"), lost)
        tell(told)

    def abandon(self, name: str) -> None:
        """Nobody waits for this session to open any more; none is fine."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return
            why = Gone(f"training session {name} was given up while it opened", param="id")
            told = self._end(session, why, why)
        tell(told)

    def sweep(self) -> None:
        """Drops idle sessions, fails calls that wait for one that never comes, forgets old results."""
        told: Told = []
        with self._lock:
            for session in [*self._sessions.values(), *self._gone.values()]:
                told += session.calls.sweep()
            now = self._clock()
            for session in list(self._sessions.values()):
                idle = not session.calls.pending and session.program is None
                if idle and now - session.used >= session.ttl:
                    expired = messages.expired(session.id, session.ttl)
                    told += self._end(session, expired, expired)
        tell(told)

    def shut_down(self) -> None:
        """Ends all sessions; nothing more is taken. After this, run_next finds nothing."""
        told: Told = []
        with self._lock:
            self._closed = True
            for session in list(self._sessions.values()):
                reason = f"the engine shut down, and training session {session.id} ended with it"
                told += self._end(session, Gone(reason, param="id"), Unavailable(reason))
        tell(told)
        self._driver.shut_down()

    @property
    def counts(self) -> tuple[int, int]:
        """Open sessions, and how many there may be."""
        return len(self._sessions), self._settings.sessions_max

    # -- for the trainer thread

    def bind(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, by any thread, when there is something for run_next."""
        self._driver.bind(wake)

    @property
    def ready(self) -> bool:
        """Whether run_next would find something."""
        return self._driver.ready

    def run_next(self) -> bool:
        """Computes the next part of the session whose turn it is; False if there is none."""
        return self._driver.run_next()

    # -- parts; the lock is held

    def _described(self, session: TrainingSession) -> dict[str, Any]:
        return describe(session, self._host.memory_budget.held().get(session.id), self._clock())

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this engine is shutting down", retry_after=5.0)

    def _find(self, name: str) -> TrainingSession:
        session = self._sessions.get(name)
        if session is not None and session.opened.done():
            return session
        raise self._missing(name)

    def _missing(self, name: str) -> TemperError:
        gone = self._gone.get(name)
        if gone is not None and gone.ended is not None:
            return Gone(gone.ended.message, param="id")
        instance = session_instance(name)
        if instance is not None and instance != self.instance:
            return messages.of_another_process(name)
        return messages.unknown_session(name)

    def _forgotten(self, future: str) -> Gone:
        return messages.forgotten(future, self._settings.session_results, self._settings.session_result_seconds)

    def _start_next(self, session: TrainingSession) -> Told:
        if session.program is not None or session.ended is not None:
            return []
        entry = session.calls.begin()
        if entry is None or entry.call is None:
            return []
        session.entry = entry
        program = call_program(session.resident, entry.call, lambda: self._interrupt(session))
        return self._driver.start(session, program)

    def _interrupt(self, session: TrainingSession) -> None:
        if session.ended is not None:
            raise SessionEnded

    def _finished(self, session: TrainingSession, result: Any, error: BaseException | None) -> Told:
        result_json = None
        try:
            result_json = to_json(result, inf_nan_mode="null") if error is None else None
        except Exception as caught:  # of this call alone
            error = caught
        if error is not None:
            error = refusal_of(error) or error
        if error is not None and not isinstance(error, TemperError):
            self._log.error("session.call_crashed", session=session.id, exc_info=error)
        session.program, session.used = None, self._clock()
        entry, session.entry = session.entry, None
        if entry is None:  # it was the opening
            if error is not None:
                del self._sessions[session.id]
                self._host.memory_budget.release_session(session.id)
                return [lambda: session.opened.set_exception(error)]
            self._metrics.sessions.set(len(self._sessions))
            self._log.info("session.opened", session=session.id)
            return [lambda: session.opened.set_result(None)]
        told = session.calls.end(entry, result_json, error)
        self._metrics.session_calls.labels(entry.kind, entry.state).inc()
        self._metrics.session_call_seconds.labels(entry.kind).observe(entry.ended - entry.submitted)
        return told + self._start_next(session)

    def _end(self, session: TrainingSession, why: TemperError, lost: TemperError) -> Told:
        """The session is over: its calls fail with ``lost``, its memory is free as soon as it does not compute."""
        session.ended = why
        del self._sessions[session.id]
        self._gone[session.id] = session
        while len(self._gone) > _TOMBSTONES:
            self._gone.popitem(last=False)
        told = session.calls.fail_all(lost)
        if not session.opened.done():
            told.append(lambda: session.opened.set_exception(why))
        if not session.computing:
            self._release(session)
        self._metrics.sessions.set(len(self._sessions))
        self._log.info("session.ended", session=session.id, reason=why.message)
        return told

    def _release(self, session: TrainingSession) -> None:
        session.program = session.entry = session.part = None
        session.resident.policy = None
        self._host.memory_budget.release_session(session.id)
