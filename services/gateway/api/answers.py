"""Answering with completions: in one piece, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import TemperError
from services.gateway.disconnect import while_connected
from services.gateway.errors import payload_of
from services.gateway.generation import Generation
from services.gateway.limits import Reservation
from services.gateway.schemas.sampling import SamplingFields
from services.gateway.sse import EventStream, event
from services.gateway.state import Gateway

Body = TypeVar("Body", bound=SamplingFields)
Result = TypeVar("Result")
log = structlog.get_logger(__name__)


def adapter_header(adapter: str | None) -> dict[str, str]:
    """The version that answered; no header for the model without adapter, as `adapter` is null in the body."""
    return {} if adapter is None else {"x-temper-adapter": adapter}


def error_event(error: Exception) -> bytes:
    """What a stream ends with when it fails after its headers were sent; no [DONE] follows."""
    return event(payload_of(error))


async def answer(
    request: Request,
    body: Body,
    gateway: Gateway,
    reservation: Reservation,
    *,
    prepare: Callable[[Request, Body, Gateway], Coroutine[Any, Any, Generation]],
    chunks: Callable[[Generation, Body], AsyncGenerator[bytes, None]],
    complete: Callable[[Generation, Body], Coroutine[Any, Any, Response]],
    failed: Callable[[Exception], bytes] = error_event,
) -> Response:
    """Answers a request for completions, streamed if it asks for that; gives its places back when that is over.

    Args:
        prepare: from the body to what is sent to the engines.
        chunks: the encoded events of a stream.
        complete: the answer in one piece.
        failed: the encoded event that ends a stream which fails.

    Raises:
        TemperError: the request is refused, or the engine did not finish it.
        ClientDisconnected: the client left before the answer began.
    """
    streaming = False
    try:
        generation = await while_connected(request, prepare(request, body, gateway))
        if not body.stream:
            return await while_connected(request, complete(generation, body))
        response = await _stream_response(request, gateway, generation, chunks(generation, body), reservation, failed)
        streaming = True
        return response
    finally:
        if not streaming:
            reservation.release()


async def within(reservation: Reservation, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Does work that is no completion in the place of one, which is given back when it is done.

    Raises:
        ClientDisconnected: the client left, or what the work raises.
    """
    try:
        return await while_connected(request, work)
    finally:
        reservation.release()


def json_response(body: dict[str, Any], adapter: str | None) -> Response:
    """An answer in one piece."""
    return Response(to_json(body, inf_nan_mode="null"), headers=adapter_header(adapter), media_type="application/json")


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _stream_response(
    request: Request,
    gateway: Gateway,
    generation: Generation,
    events: AsyncGenerator[bytes, None],
    reservation: Reservation,
    failed: Callable[[Exception], bytes],
) -> EventStream:
    """Waits for the first event, so that errors keep their status and the version is known, then streams.

    Raises:
        TemperError: the engine refused.
        ClientDisconnected: the client left while it waited.
    """
    try:
        first = await while_connected(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    answering = next((choice for choice in generation.choices if choice.begun), generation.choices[0])
    return EventStream(
        _guarded(first, events, failed),
        keep_alive=gateway.settings.keep_alive_seconds,
        headers=adapter_header(answering.adapter),
        on_close=reservation.release,
    )


async def _guarded(
    first: bytes, events: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes]
) -> AsyncGenerator[bytes, None]:
    """The events; a failure becomes an error event."""
    try:
        yield first
        async for item in events:
            yield item
    except TemperError as error:
        yield failed(error)
    except Exception as error:
        log.exception("stream failed")
        yield failed(error)
    finally:
        await events.aclose()
