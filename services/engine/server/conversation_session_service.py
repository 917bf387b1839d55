"""gRPC service of conversation sessions (temper.v1.Histories)."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import structlog
from grpc import aio

from services.common.errors import InvalidRequest, Overloaded, TemperError, Unavailable
from services.common.pb import engine_pb2, histories_pb2_grpc
from services.common.pb import histories_pb2 as pb
from services.engine.requests.conversation_session import SessionInfo, SessionName
from services.engine.server.conversation_session_manager import ConversationSessionManager
from services.engine.server.errors import status_code, to_message
from services.engine.server.protobuf import session_name

_THREADS = 4
"""Threads for calls that are short or wait for disk or store."""
_TRANSFERS = 4
"""Most exports and imports at a time. Each has a thread until its client has received or sent the last byte."""

P = ParamSpec("P")
T = TypeVar("T")
_Context: TypeAlias = "aio.ServicerContext[Any, Any]"
log = structlog.get_logger(__name__)


class ConversationSessionService(histories_pb2_grpc.HistoriesServicer):
    """gRPC service that calls the session manager in threads of its own: this event loop also carries the tokens of all
    requests, and a client that sends a file slowly must not block the threads of others.

    Args:
        sessions: session manager.
    """

    def __init__(self, sessions: ConversationSessionManager) -> None:
        self._sessions = sessions
        self._calls = ThreadPoolExecutor(_THREADS, "sessions")
        self._transfers = ThreadPoolExecutor(_TRANSFERS, "session-files")
        self._transferring = 0

    def close(self) -> None:
        """Lets the threads end."""
        for threads in (self._calls, self._transfers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def List(  # noqa: N802
        self, request: pb.ListHistoriesRequest, context: _Context
    ) -> pb.ListHistoriesResponse:
        found = await self._call(context, self._sessions.list, request.owner)
        return pb.ListHistoriesResponse(histories=map(session_message, found))

    async def Get(self, request: pb.GetHistoryRequest, context: _Context) -> pb.History:  # noqa: N802
        return session_message(await self._call(context, lambda: self._sessions.get(session_name(request.session))))

    async def Save(self, request: pb.SaveHistoryRequest, context: _Context) -> pb.History:  # noqa: N802
        return session_message(await self._call(context, lambda: self._sessions.save(session_name(request.session))))

    async def Delete(  # noqa: N802
        self, request: pb.DeleteHistoryRequest, context: _Context
    ) -> pb.DeleteHistoryResponse:
        await self._call(context, lambda: self._sessions.delete(session_name(request.session)))
        return pb.DeleteHistoryResponse()

    async def Export(  # noqa: N802
        self, request: pb.ExportHistoryRequest, context: _Context
    ) -> AsyncIterator[pb.HistoryChunk]:
        stream: _ExportStream | None = None
        try:
            with self._transfer():
                stream = _ExportStream(self._transfers, lambda: self._sessions.export(session_name(request.session)))
                try:
                    # The next piece is read only when the one before is sent, at the client's pace.
                    while (piece := await stream.next()) is not None:
                        yield pb.HistoryChunk(data=piece)
                finally:
                    await stream.close()
        except Exception as error:  # every error is an answer
            await _refuse(context, error)

    async def Import(  # noqa: N802
        self, request_iterator: AsyncIterable[pb.ImportHistoryRequest], context: _Context
    ) -> pb.History:
        try:
            with self._transfer():
                requests = aiter(request_iterator)
                first = await anext(requests, None)
                if first is None or not first.HasField("session"):
                    raise InvalidRequest("the first message of an import must name the session", param="session")
                return await self._import(session_name(first.session), _ImportStream(first, requests))
        except Exception as error:
            await _refuse(context, error)

    async def _import(self, session: SessionName, stream: _ImportStream) -> pb.History:
        reading = self._transfers.submit(self._sessions.import_file, session, stream)
        try:
            return session_message(await asyncio.wrap_future(reading))
        finally:
            stream.end()
            await _wait_for_thread(reading)

    async def _call(self, context: _Context, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function of the manager in a thread; an error ends the call."""
        try:
            return await asyncio.wrap_future(self._calls.submit(function, *args, **kwargs))
        except Exception as error:
            await _refuse(context, error)

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """Context manager around an export or import. Raises Overloaded while there are too many."""
        if self._transferring >= _TRANSFERS:
            raise Overloaded(
                f"{self._transferring} sessions are exported or imported at the moment: try again when one has ended",
                retry_after=5.0,
            )
        self._transferring += 1
        try:
            yield
        finally:
            self._transferring -= 1


class _ExportStream:
    """Export stream, piece by piece.

    Args:
        threads: pool to run in.
        begin: export function of the manager; may block and raise.
    """

    def __init__(self, threads: ThreadPoolExecutor, begin: Callable[[], Iterator[bytes]]) -> None:
        self._threads = threads
        self._begin = begin
        self._pieces: Iterator[bytes] | None = None
        self._asked: concurrent.futures.Future[bytes | None] | None = None

    async def next(self) -> bytes | None:
        """Next piece; None: that was the last one. Raises what the manager raises."""
        self._asked = self._threads.submit(self._next)
        return await asyncio.wrap_future(self._asked)

    async def close(self) -> None:
        """Ends the export at any point, so that the manager releases what it holds."""
        if self._asked is not None:
            await _wait_for_thread(self._asked)
        await _wait_for_thread(self._threads.submit(self._close))

    def _next(self) -> bytes | None:
        if self._pieces is None:
            self._pieces = self._begin()
        return next(self._pieces, None)

    def _close(self) -> None:
        close = getattr(self._pieces, "close", None)  # generators have it
        if close is not None:
            close()


class _ImportStream:
    """Import stream for the thread that reads it: each piece is fetched on demand. Made on the event loop."""

    def __init__(self, first: pb.ImportHistoryRequest, rest: AsyncIterator[pb.ImportHistoryRequest]) -> None:
        self._first = first
        self._rest = rest
        self._events = asyncio.get_running_loop()
        self._asked: concurrent.futures.Future[pb.ImportHistoryRequest | None] | None = None
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of the file; raises Unavailable if the client goes away."""
        message = self._first
        while True:
            if message.data:
                yield message.data
            if message.last:
                return
            message = self._fetch()
            if message.HasField("session"):
                raise InvalidRequest("only the first message of an import names the session", param="session")

    def end(self) -> None:
        """Ends fetching; a thread that waits for a piece gets an error."""
        self._ended = True
        if self._asked is not None:
            self._asked.cancel()

    def _fetch(self) -> pb.ImportHistoryRequest:
        asked = self._asked = asyncio.run_coroutine_threadsafe(self._next(), self._events)
        if self._ended:
            asked.cancel()
        try:
            message = asked.result()
        except concurrent.futures.CancelledError:
            message = None
        if message is None:  # a client that goes away looks like one that has sent all, hence `last`
            raise Unavailable("the import was broken off")
        return message

    async def _next(self) -> pb.ImportHistoryRequest | None:
        return await anext(self._rest, None)


async def _wait_for_thread(work: concurrent.futures.Future[Any]) -> None:
    """Waits until a thread has ended some work, however it ends, even if this task is cancelled: what the work uses is
    released only then."""
    ended = asyncio.wrap_future(work)
    ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # reported elsewhere
    waiting = asyncio.ensure_future(asyncio.wait([ended]))
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _refuse(context: _Context, error: Exception) -> NoReturn:
    """Ends a call with an error; a bug is logged, and the client gets no details."""
    if not isinstance(error, TemperError):
        log.error("a call about a session failed", exc_info=error)
    await context.abort(status_code(error), to_message(error).message)


def session_message(info: SessionInfo) -> pb.History:
    """Description of a session as a protobuf message."""
    return pb.History(
        session=engine_pb2.SessionRef(owner=info.session.owner, name=info.session.name),
        tokens=info.tokens,
        requests=info.requests,
        adapter=info.adapter,
        created_unix_ms=_milliseconds(info.created),
        used_unix_ms=_milliseconds(info.used),
        expires_unix_ms=_milliseconds(info.expires),
        saved=info.saved,
        bytes=info.sizes,
    )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
