"""gRPC service of training sessions (temper.v1.Sessions)."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import structlog
from grpc import aio
from pydantic import ValidationError
from pydantic_core import to_json

from services.common.errors import InvalidRequest, TemperError, Unavailable
from services.common.jobs.training_sessions.calls import OpenSession
from services.common.jobs.training_sessions.names import future_session
from services.common.pb import sessions_pb2 as pb
from services.common.pb import sessions_pb2_grpc
from services.engine.server.errors import to_message
from services.trainer.training_sessions.call_queue import CallState
from services.trainer.training_sessions.manager import TrainingSessionManager
from services.trainer.training_sessions.session import FutureView

_Context: TypeAlias = "aio.ServicerContext[Any, Any]"
_LONGEST_WAIT = 120.0
_OPEN_SECONDS = 120.0
_STATES = {
    CallState.PENDING: pb.FUTURE_STATE_PENDING,
    CallState.DONE: pb.FUTURE_STATE_DONE,
    CallState.FAILED: pb.FUTURE_STATE_FAILED,
}

log = structlog.get_logger(__name__)


class TrainingSessionsService(sessions_pb2_grpc.SessionsServicer):
    """gRPC service of training sessions. Long calls run in threads: this event loop also carries the tokens of all
    requests."""

    def __init__(self, sessions: TrainingSessionManager) -> None:
        self._sessions = sessions

    async def Open(self, request: pb.OpenSessionRequest, context: _Context) -> pb.SessionAnswer:  # noqa: N802, ARG002
        try:
            name, opened = self._sessions.open(_parse(request.request_json), request.owner)
            try:
                await asyncio.wait_for(asyncio.wrap_future(opened), _OPEN_SECONDS)
            except BaseException:  # also when the client has gone: nobody would know the session
                self._sessions.abandon(name)
                raise
            return _session(self._sessions.get(name))
        except TimeoutError:
            busy = Unavailable(f"the trainer could not open a session within {_OPEN_SECONDS:g} s", retry_after=10.0)
            return pb.SessionAnswer(error=to_message(busy))
        except Exception as error:  # every error is an answer
            return pb.SessionAnswer(error=to_message(_logged(error)))

    async def Get(self, request: pb.GetSessionRequest, context: _Context) -> pb.SessionAnswer:  # noqa: N802, ARG002
        try:
            self._sessions.check_owner(request.id, request.owner)
            return _session(self._sessions.get(request.id))
        except Exception as error:
            return pb.SessionAnswer(error=to_message(_logged(error)))

    async def List(  # noqa: N802
        self,
        request: pb.ListSessionsRequest,
        context: _Context,  # noqa: ARG002
    ) -> pb.ListSessionsResponse:
        found = self._sessions.open_sessions(request.owner)
        return pb.ListSessionsResponse(session_json=[to_json(described) for described in found])

    async def Close(self, request: pb.CloseSessionRequest, context: _Context) -> pb.SessionAnswer:  # noqa: N802, ARG002
        try:
            self._sessions.check_owner(request.id, request.owner)
            described = _session(self._sessions.get(request.id))
            self._sessions.close(request.id)
        except Exception as error:
            return pb.SessionAnswer(error=to_message(_logged(error)))
        return described

    async def Submit(self, request: pb.SubmitCallRequest, context: _Context) -> pb.FutureAnswer:  # noqa: N802, ARG002
        try:
            self._sessions.check_owner(request.session, request.owner)
            view = await asyncio.to_thread(self._sessions.submit, request.session, request.call_json)
        except Exception as error:
            return pb.FutureAnswer(error=to_message(_logged(error)))
        return pb.FutureAnswer(future=_future(view))

    async def Wait(self, request: pb.WaitFutureRequest, context: _Context) -> pb.FutureAnswer:  # noqa: N802
        try:
            self._sessions.check_owner(future_session(request.id) or "", request.owner)
            view = self._sessions.look(request.id)
            if view.state is CallState.PENDING and request.wait_ms:
                seconds = min(request.wait_ms / 1000, _LONGEST_WAIT)
                if (left := context.time_remaining()) is not None:
                    seconds = min(seconds, left)
                await self._ended(request.id, seconds)
                view = self._sessions.look(request.id)
        except Exception as error:
            return pb.FutureAnswer(error=to_message(_logged(error)))
        return pb.FutureAnswer(future=_future(view))

    async def _ended(self, future: str, seconds: float) -> None:
        """Waits until the call has ended, but no longer than ``seconds``."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        if not self._sessions.watch(future, on_end):
            return
        try:
            await asyncio.wait_for(ended.wait(), seconds)
        except TimeoutError:
            return
        finally:
            self._sessions.unwatch(future, on_end)


def _parse(request_json: bytes) -> OpenSession:
    return OpenSession.model_validate_json(request_json)


def _session(described: dict[str, Any]) -> pb.SessionAnswer:
    return pb.SessionAnswer(session_json=to_json(described))


def _future(view: FutureView) -> pb.Future:
    message = pb.Future(
        id=view.id,
        session=view.session,
        seq=view.seq,
        operation=view.kind,
        state=_STATES[view.state],
        running=view.running,
        ahead=view.ahead,
        missing_seq=view.missing or 0,
        result_json=view.result or b"",
    )
    if view.error is not None:
        message.error.CopyFrom(to_message(view.error))
    return message


def _logged(error: Exception) -> Exception:
    """Error as the client gets it; a bug is logged here."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return InvalidRequest(f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None)
    if not isinstance(error, TemperError):
        log.error("session call failed", exc_info=error)
    return error
