"""Answering with completions: in one piece, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import TemperError
from services.gateway.disconnect import while_connected
from services.gateway.errors import payload_of
from services.gateway.generation import Generation
from services.gateway.limits import Reservation
from services.gateway.sse import EventStream, event
from services.gateway.state import Gateway

log = structlog.get_logger(__name__)


def adapter_header(adapter: str | None) -> dict[str, str]:
    """The version that answered; no header for the model without adapter, as `adapter` is null in the body."""
    return {} if adapter is None else {"x-temper-adapter": adapter}


def json_response(answer: dict[str, Any], adapter: str | None) -> Response:
    """An answer in one piece."""
    body = to_json(answer, inf_nan_mode="null")
    return Response(body, headers=adapter_header(adapter), media_type="application/json")


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def stream_response(
    request: Request,
    gateway: Gateway,
    generation: Generation,
    events: AsyncGenerator[bytes, None],
    reservation: Reservation,
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
        _guarded(first, events),
        keep_alive=gateway.settings.keep_alive_seconds,
        headers=adapter_header(answering.adapter),
        on_close=reservation.release,
    )


async def _guarded(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events; a failure becomes an error event, after which no [DONE] follows."""
    try:
        yield first
        async for item in events:
            yield item
    except TemperError as error:
        yield event(payload_of(error))
    except Exception as error:
        log.exception("stream failed")
        yield event(payload_of(error))
    finally:
        await events.aclose()
