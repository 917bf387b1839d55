"""Answering with completions: in one piece, or as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest, TemperError
from services.common.shutdown import cancel_and_wait
from services.gateway.core.admission import Reservation
from services.gateway.core.client_disconnect import while_connected
from services.gateway.core.errors import payload_of
from services.gateway.core.sse import EventStream, event
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation
from services.gateway.protocol.fields.sampling import SamplingFields

Body = TypeVar("Body", bound=SamplingFields)
Result = TypeVar("Result")
log = structlog.get_logger(__name__)


_SESSION_HEADER = "x-session-id"
_LONGEST_SESSION = 256
CANARY_HEADER = "x-temper-canary"
_LEFT_OUT_HEADER = "x-temper-left-out-tools"
SESSION_HEADER = {
    "parameters": [
        {
            "in": "header",
            "name": _SESSION_HEADER,
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": _LONGEST_SESSION},
            "description": "The same as `session_id` in the body, for clients that cannot add fields.",
        }
    ]
}
"""`openapi_extra` of every route that uses ``answer``. As a dependency it would cost a request 0.1 ms in FastAPI."""


def adapter_header(adapter: str | None) -> dict[str, str]:
    """Header with the adapter version that answered. The model without adapter has none, as `adapter` is null in the
    body."""
    return {} if adapter is None else {"x-temper-adapter": adapter}


def noted(response: Response, body: SamplingFields, generation: Generation) -> Response:
    """Response with headers that say which of the request's tools were not offered, and its part in a canary."""
    if body.left_out_tools:
        response.headers[_LEFT_OUT_HEADER] = ", ".join(body.left_out_tools)
    if generation.enrolment is not None:
        response.headers[CANARY_HEADER] = generation.enrolment.header
    return response


def error_event(error: Exception) -> bytes:
    """Last event of a stream that fails after its headers were sent; no [DONE] follows."""
    return event(payload_of(error))


async def answer(
    request: Request,
    body: Body,
    context: InferenceContext,
    reservation: Reservation,
    *,
    prepare: Callable[[Request, Body, InferenceContext, str | None], Coroutine[Any, Any, Generation]],
    chunks: Callable[[Generation, Body], AsyncGenerator[bytes, None]],
    complete: Callable[[Generation, Body], Coroutine[Any, Any, Response]],
    failed: Callable[[Exception], bytes] = error_event,
) -> Response:
    """Answers a request for completions, streamed if it asks for that; gives its places back when that is over.

    Args:
        prepare: from the body, and the session that it or a header names, to what is sent to the engines.
        chunks: the encoded events of a stream.
        complete: the answer in one piece.
        failed: the encoded event that ends a stream which fails.

    Raises:
        TemperError: the request is refused, or the engine did not finish it.
        ClientDisconnected: the client left before the answer began.
    """
    streaming = False
    try:
        session = session_named(request, body)
        await while_connected(request, context.engine_started())
        generation = await while_connected(request, prepare(request, body, context, session))
        if not body.stream:
            return noted(await while_connected(request, complete(generation, body)), body, generation)
        response = await _stream_response(request, context, generation, chunks(generation, body), reservation, failed)
        streaming = True
        return noted(response, body, generation)
    finally:
        if not streaming:
            reservation.release()


async def within(reservation: Reservation, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work other than a completion in a place reserved for one, and gives the place back when the work is done.

    Raises:
        ClientDisconnected: the client left, or what the work raises.
    """
    try:
        return await while_connected(request, work)
    finally:
        reservation.release()


def session_named(request: Request, body: SamplingFields) -> str | None:
    """Session that the body or the header names.

    Raises:
        InvalidRequest: they name two different ones, or the header is empty or too long.
    """
    header = request.headers.get(_SESSION_HEADER)
    if header is not None and not 0 < len(header) <= _LONGEST_SESSION:
        raise InvalidRequest(
            f"the header X-Session-Id must have 1 to {_LONGEST_SESSION} characters, it has {len(header)}",
            param=_SESSION_HEADER,
        )
    if header is not None and body.session_id not in (None, header):
        raise InvalidRequest(
            "session_id and the header X-Session-Id name different sessions: send one", param="session_id"
        )
    return header if body.session_id is None else body.session_id


def json_response(body: dict[str, Any], adapter: str | None) -> Response:
    """An answer in one piece."""
    return Response(to_json(body, inf_nan_mode="null"), headers=adapter_header(adapter), media_type="application/json")


async def _stream_response(
    request: Request,
    context: InferenceContext,
    generation: Generation,
    chunks: AsyncGenerator[bytes, None],
    reservation: Reservation,
    failed: Callable[[Exception], bytes],
) -> EventStream:
    """Streams the events of a generation. It waits a while for the first one, so that errors before it have a status of
    their own and the version is known; later errors are events.

    Raises:
        TemperError: the engine refused.
        ClientDisconnected: the client left while it waited.
    """
    settings = context.settings
    events = StartedEvents(chunks, failed)
    try:
        patience = min(settings.stream_start_seconds, settings.keep_alive_seconds)
        begun = await while_connected(request, events.started(patience))
    except BaseException:
        await events.aclose()
        raise
    answering = next((choice for choice in generation.choices if choice.begun), generation.choices[0])
    return EventStream(
        events,
        keep_alive=settings.keep_alive_seconds,
        # The engine ends its work by itself before that. The limit is for a client that reads very slowly.
        longest=settings.request_timeout_seconds + settings.write_timeout_seconds,
        headers=adapter_header(answering.adapter) if begun else {},
        begun=begun,
        on_close=reservation.release,
    )


class StartedEvents:
    """Events of a stream, the first of which is awaited from the start. A failure after it becomes an event.

    Args:
        chunks: the encoded events; closed by ``aclose``, whether or not anything was read.
        failed: makes the last event of a failure.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes]) -> None:
        self._chunks = chunks
        self._failed = failed
        self._first: asyncio.Task[bytes] | None = asyncio.create_task(_first(chunks))
        self._ended = False

    async def started(self, seconds: float) -> bool:
        """Waits up to so many seconds for the first event; True if it is there.

        Raises:
            TemperError: what it failed with.
        """
        if self._first is None:
            return True
        await asyncio.wait((self._first,), timeout=seconds)
        if not self._first.done():
            return False
        self._first.result()
        return True

    def __aiter__(self) -> StartedEvents:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._first is None:
                return await anext(self._chunks)
            # Shielded: a reader that is cancelled leaves the task to aclose.
            first = self._first.result() if self._first.done() else await asyncio.shield(self._first)
            self._first = None
            return first
        except StopAsyncIteration:
            raise
        except TemperError as error:
            self._ended = True
            return self._failed(error)
        except Exception as error:
            self._ended = True
            log.exception("stream failed")
            return self._failed(error)

    async def aclose(self) -> None:
        """Ends the engines' work."""
        self._ended = True
        if self._first is not None:
            await cancel_and_wait(self._first)
            self._first = None
        await self._chunks.aclose()


async def _first(chunks: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(chunks)
