"""Training sessions behind the gateway: which engine holds one, and what it says when that engine is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
from grpc import aio
from pydantic_core import to_json

from services.common.errors import DoesNotFit, Gone, NotFound, Overloaded, TemperError, Unavailable
from services.common.jobs.training_sessions.calls import Call, OpenSession
from services.common.jobs.training_sessions.names import future_session, session_instance
from services.common.pb import engine_pb2
from services.common.pb import sessions_pb2 as pb
from services.gateway.auth.caller import owner
from services.gateway.core.errors import engine_error
from services.gateway.engines.client import EngineClient

_OPEN_SECONDS = 125.0
_CALL_SECONDS = 30.0
_POLL_SECONDS = 10.0
"""Longest duration of one Wait: a stopping gateway is noticed between two."""
_RETRY_PAUSE = 0.3


A = TypeVar("A", pb.SessionAnswer, pb.FutureAnswer)


class TrainingSessionRouter:
    """Calls the engine that a session's id names.

    Args:
        clients: all engines as of now.
        patience: seconds for which an engine that does not answer may come back before its sessions count as gone.
    """

    def __init__(self, clients: Callable[[], Sequence[EngineClient]], patience: float) -> None:
        self._clients = clients
        self._patience = patience
        self._started = asyncio.get_running_loop().time()

    async def open(self, request: OpenSession) -> bytes:
        """A new session as JSON, on the engine with the fewest; the next one is asked where one has no room.

        Raises:
            Overloaded, DoesNotFit: no engine has room; what the last one said.
            Unavailable: no engine that trains is there.
            TemperError: what the engine found wrong.
        """
        message = pb.OpenSessionRequest(request_json=to_json(request), owner=owner())
        candidates = [client for client in self._clients() if client.ready and client.instance]
        refusal: TemperError = Unavailable("no engine that trains is ready (TEMPER_TRAINER)", retry_after=2.0)
        for client in sorted(candidates, key=_sessions_there):
            try:
                answer = await _call(client, client.sessions_stub().Open(message, timeout=_OPEN_SECONDS))
                return answer.session_json
            except (Overloaded, DoesNotFit, Unavailable) as error:
                refusal = error
        raise refusal

    async def get(self, session: str) -> bytes:
        """One session as JSON. Raises NotFound, Gone, Unavailable."""
        client = self._holder(session)
        message = pb.GetSessionRequest(id=session, owner=owner())
        answer = await _call(client, client.sessions_stub().Get(message, timeout=_CALL_SECONDS))
        return answer.session_json

    async def open_sessions(self) -> list[bytes]:
        """The caller's sessions on all engines that can be asked."""
        clients = [client for client in self._clients() if client.connected and client.instance]
        message = pb.ListSessionsRequest(owner=owner())
        answers = await asyncio.gather(
            *(client.sessions_stub().List(message, timeout=_CALL_SECONDS) for client in clients),
            return_exceptions=True,
        )
        return [found for answer in answers if not isinstance(answer, BaseException) for found in answer.session_json]

    async def close(self, session: str) -> None:
        """Raises NotFound, Gone, Unavailable."""
        client = self._holder(session)
        message = pb.CloseSessionRequest(id=session, owner=owner())
        await _call(client, client.sessions_stub().Close(message, timeout=_CALL_SECONDS))

    async def submit(self, session: str, call: Call) -> pb.Future:
        """Puts a call into the session's line.

        Raises:
            NotFound, Gone: there is no such session, or not any more.
            Conflict, Overloaded, InvalidRequest: what the engine found wrong.
            Unavailable: it does not answer; the call may have arrived, so send it again with the same seq.
        """
        client = self._holder(session)
        call_json = await asyncio.to_thread(to_json, call)
        message = pb.SubmitCallRequest(session=session, call_json=call_json, owner=owner())
        answer = await _call(client, client.sessions_stub().Submit(message, timeout=_CALL_SECONDS))
        return answer.future

    async def wait(self, future: str, seconds: float, stopping: asyncio.Event) -> pb.Future:
        """A call once it has ended, or as it is after ``seconds``. An engine that is lost meanwhile is waited for, too.

        Raises:
            NotFound: there is no such future.
            Gone: its result is not kept any more.
            Unavailable: the engine does not answer, and may come back.
        """
        session = future_session(future)
        if session is None:
            raise NotFound(f"no such future: {future[:80]!r}", param="id")
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            left = max(0.0, until - loop.time())
            try:
                found = await self._wait_once(session, future, min(left, _POLL_SECONDS))
            except Unavailable:
                if loop.time() + _RETRY_PAUSE >= until or stopping.is_set():
                    raise
                await asyncio.sleep(_RETRY_PAUSE)
                continue
            if found.state != pb.FUTURE_STATE_PENDING or loop.time() >= until or stopping.is_set():
                return found

    async def _wait_once(self, session: str, future: str, seconds: float) -> pb.Future:
        try:
            client = self._holder(session)
        except Gone as error:
            # Nobody can say any more how the call ended: to its client it has failed.
            message = engine_pb2.Error(code=engine_pb2.ERROR_CODE_GONE, message=error.message)
            return pb.Future(id=future, session=session, state=pb.FUTURE_STATE_FAILED, error=message)
        message_ = pb.WaitFutureRequest(id=future, wait_ms=int(seconds * 1000), owner=owner())
        answer = await _call(client, client.sessions_stub().Wait(message_, timeout=seconds + _CALL_SECONDS))
        return answer.future

    def _holder(self, session: str) -> EngineClient:
        """The engine that a session is in.

        Raises:
            NotFound: it is no session's id.
            Gone: the engine's process has ended.
            Unavailable: it may only be out of reach.
        """
        instance = session_instance(session)
        if instance is None:
            raise NotFound(f"no such training session: {session[:80]!r}", param="id")
        now = asyncio.get_running_loop().time()
        named = [client for client in self._clients() if client.instance == instance]
        if connected := [client for client in named if client.connected]:
            return connected[0]
        for client in named or self._clients():
            since = self._started if client.away_since is None else client.away_since
            if not client.connected and now - since < self._patience:
                raise Unavailable(
                    f"the engine that may hold {session} does not answer ({client.last_error}); if its process has "
                    "ended, the session is lost, and this will say so",
                    retry_after=1.0,
                )
        raise Gone(
            f"the engine process that held training session {session} has ended or has been out of reach for "
            f"{self._patience:g} s: the session and what was not saved are lost; open a new one from a checkpoint or "
            "an adapter version",
            param="id",
        )


def _sessions_there(client: EngineClient) -> int:
    return client.status.sessions_open if client.status is not None else 0


async def _call(client: EngineClient, call: Awaitable[A]) -> A:
    """The engine's answer. Raises Unavailable, and what the answer says instead of one."""
    try:
        answer = await call
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise Overloaded(
                f"engine {client.address} does not take a message of this size (TEMPER_MAX_MESSAGE_BYTES): split it"
            ) from error
        raise client.unavailable(error, retry_after=1.0) from error
    if answer.HasField("error"):
        raise engine_error(answer.error)
    return answer
