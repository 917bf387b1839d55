"""Sessions of clients behind the gateway: which engine keeps one, and what it can be asked about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from grpc import aio

from services.common.errors import (
    ENGINE_FAULT,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.common.pb import engine_pb2
from services.common.pb import histories_pb2 as pb
from services.gateway.engines.client import EngineClient
from services.gateway.engines.pool import EnginePool

_CALL_SECONDS = 30.0
_ERRORS: Mapping[grpc.StatusCode, type[TemperError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

A = TypeVar("A")
Asking: TypeAlias = Callable[[EngineClient], Awaitable[A]]


@dataclass(frozen=True, slots=True)
class ConversationSession:
    """A session, and the engine that keeps it."""

    history: pb.History
    client: EngineClient


class ConversationSessionRouter:
    """Asks the engine that a session's requests go to, or, when that does not know it, all.

    Args:
        engines: who is asked.
        long_seconds: for what writes to disk or store.
    """

    def __init__(self, engines: EnginePool, long_seconds: float) -> None:
        self._engines = engines
        self._long_seconds = long_seconds

    async def all_of(self, owner: str) -> list[ConversationSession]:
        """All sessions of an owner, last used first; of one that several engines keep, what the last of them has.

        Raises:
            Unavailable: no engine can be asked.
        """
        message = pb.ListHistoriesRequest(owner=owner)

        async def ask(client: EngineClient) -> list[ConversationSession]:
            answer = await _call(client, client.histories_stub().List(message, timeout=_CALL_SECONDS))
            return [ConversationSession(history, client) for history in answer.histories]

        found: dict[str, ConversationSession] = {}
        for kept in _last_used_first([kept for some in await self._ask_all(ask) for kept in some]):
            found.setdefault(kept.history.session.name, kept)
        return list(found.values())

    async def get(self, session: engine_pb2.SessionRef) -> ConversationSession:
        """One session.

        Raises:
            NotFound: no engine that can be asked has it.
            Unavailable: none can be asked.
        """
        sticky = self._engines.sticky_engine(session.owner, session.name)
        if sticky is not None and sticky.connected:
            try:
                return await self._get(sticky, session)
            except (NotFound, Unavailable):
                pass  # it may have been there before, or be known elsewhere, too

        async def ask(client: EngineClient) -> list[ConversationSession]:
            try:
                return [await self._get(client, session)]
            except NotFound:
                return []

        found = [kept for some in await self._ask_all(ask) for kept in some]
        if not found:
            raise _unknown(session)
        return _last_used_first(found)[0]

    async def save(self, session: engine_pb2.SessionRef) -> ConversationSession:
        """Has it written to disk and store.

        Raises:
            NotFound, Unavailable: as ``get``, or it could not be written.
            InvalidRequest: its engine has neither.
        """
        client = (await self.get(session)).client
        message = pb.SaveHistoryRequest(session=session)
        return ConversationSession(
            await _call(client, client.histories_stub().Save(message, timeout=self._long_seconds)), client
        )

    async def delete(self, session: engine_pb2.SessionRef) -> None:
        """Has all engines forget it.

        Raises:
            NotFound: none of them has it.
            Unavailable: one of them could not be asked, and may still have it; the others have forgotten it.
        """
        clients = self._engines.clients
        message = pb.DeleteHistoryRequest(session=session)
        results = await asyncio.gather(
            *(_call(client, client.histories_stub().Delete(message, timeout=_CALL_SECONDS)) for client in clients),
            return_exceptions=True,
        )
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, NotFound):
                raise Unavailable(
                    f"engine {client.id} may still have the session {session.name!r} ({result}): delete it again",
                    retry_after=2.0,
                ) from result
        if all(isinstance(result, NotFound) for result in results):
            raise _unknown(session)

    async def export(self, session: engine_pb2.SessionRef) -> AsyncIterator[bytes]:
        """Exports a session: its file in pieces, the first of which is there.

        Raises:
            NotFound, Unavailable: as ``get``; the latter also while the pieces are read.
            Overloaded: its engine exports others.
        """
        client = (await self.get(session)).client
        call = client.histories_stub().Export(pb.ExportHistoryRequest(session=session))
        try:
            first = await _call(client, _read(call))
        except BaseException:
            call.cancel()
            raise
        return _pieces(client, call, first)

    async def take_in(self, session: engine_pb2.SessionRef, pieces: AsyncIterator[bytes]) -> ConversationSession:
        """Has the engine that its requests go to read its file.

        Raises:
            InvalidRequest: the file is damaged, or of another model or configuration.
            Overloaded: the engine reads others.
            Unavailable: there is no engine, or it was lost.
        """
        client = self._engines.pin_session(session.owner, session.name)
        failures: list[Exception] = []

        async def messages() -> AsyncIterator[pb.ImportHistoryRequest]:
            yield pb.ImportHistoryRequest(session=session)
            try:
                async for piece in pieces:
                    yield pb.ImportHistoryRequest(data=piece)
            except Exception as error:  # it is ours to tell; the engine hears of it by what is missing
                failures.append(error)
                return
            yield pb.ImportHistoryRequest(last=True)

        try:
            return ConversationSession(await _call(client, client.histories_stub().Import(messages())), client)
        except TemperError:
            if failures:
                raise failures[0] from None
            raise

    async def _get(self, client: EngineClient, session: engine_pb2.SessionRef) -> ConversationSession:
        message = pb.GetHistoryRequest(session=session)
        return ConversationSession(
            await _call(client, client.histories_stub().Get(message, timeout=_CALL_SECONDS)), client
        )

    async def _ask_all(self, ask: Asking[A]) -> list[A]:
        """Answers of all engines that can be asked. Raises Unavailable: none could."""
        clients = [client for client in self._engines.clients if client.connected]
        answers = await asyncio.gather(*map(ask, clients), return_exceptions=True)
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not told:
            failure = next((answer for answer in answers if isinstance(answer, TemperError)), None)
            raise failure or Unavailable("no engine can be asked", retry_after=2.0)
        return told


async def _pieces(client: EngineClient, call: Any, piece: bytes | None) -> AsyncIterator[bytes]:
    try:
        while piece is not None:
            yield piece
            piece = await _call(client, _read(call))
    finally:
        call.cancel()


async def _read(call: Any) -> bytes | None:
    """The next piece of an export; None: there are no more."""
    message = await call.read()
    return None if message is aio.EOF else bytes(message.data)


async def _call(client: EngineClient, call: Awaitable[A]) -> A:
    try:
        return await call
    except aio.AioRpcError as error:
        _refuse(client, error)


def _refuse(client: EngineClient, error: aio.AioRpcError) -> NoReturn:
    kind, details = _ERRORS.get(error.code()), error.details() or "the engine gave no reason"
    if kind is not None:
        param = "session_id" if kind is NotFound else None
        raise kind(details, param=param) from error
    if error.code() == grpc.StatusCode.INTERNAL and details.startswith(ENGINE_FAULT):
        raise TemperError(details) from error
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        details = "it is of a version that keeps no sessions"
    raise Unavailable(f"engine {client.id}: {details}", retry_after=2.0) from error


def _last_used_first(found: list[ConversationSession]) -> list[ConversationSession]:
    return sorted(found, key=lambda kept: -kept.history.used_unix_ms)


def _unknown(session: engine_pb2.SessionRef) -> NotFound:
    return NotFound(f"no such session: {session.name[:80]!r}", param="session_id")
