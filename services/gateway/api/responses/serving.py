"""Runs the generation of a response: as a stream, in one piece, or in the background."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import Response

from services.common.errors import TemperError
from services.gateway.api.base.serving import json_response
from services.gateway.api.responses.background import Work
from services.gateway.api.responses.dependencies import ResponseServices
from services.gateway.api.responses.store.conversations import Turn
from services.gateway.api.responses.store.record import Record
from services.gateway.api.responses.store.store import Place
from services.gateway.api.responses.streaming.writer import EventEncoder, ResponseWriter
from services.gateway.api.responses.to_chat.translation import ChatFields
from services.gateway.core.admission import Reservation
from services.gateway.inference.generation import Generation
from services.gateway.protocol.chat.request import ChatRequest
from services.gateway.protocol.responses.request import ResponseRequest

log = structlog.get_logger(__name__)


class Answering:
    """One response.

    Args:
        gateway: where it is kept.
        body: the request.
        chat: the chat request that was made of it.
        place: where the response belongs.
        record: the object that has not begun, and what it is given.
        turn: what it adds to a conversation.
    """

    def __init__(
        self,
        stores: ResponseServices,
        body: ResponseRequest,
        chat: ChatFields,
        place: Place,
        record: Record,
        turn: Turn | None = None,
    ) -> None:
        self._stores = stores
        self._body = body
        self._chat = chat
        self._place = place
        self._record = record
        self._turn = turn
        self._stream: tuple[ResponseWriter, EventEncoder] | None = None

    async def chunks(self, generation: Generation, _: ChatRequest) -> AsyncGenerator[bytes, None]:
        """The encoded events of a stream. What the engine refuses before its first token is raised; a later failure is
        an event, and the response is kept as failed."""
        writer, encoder = self._stream = self._writer(generation), EventEncoder()
        begun = False
        try:
            async with aclosing(generation.steps()) as steps:
                async for step in steps:
                    events = [] if begun else writer.start()
                    begun = True
                    events += writer.add(step)
                    if events:
                        yield encoder.encode(events)
            events = writer.end()
        except TemperError as error:
            self._chat.rename(error)
            if not begun:
                raise
            events = []
            writer.fail(error)
        except Exception as error:
            log.exception("stream failed")
            if not begun:
                raise
            events = []
            writer.fail(error)
        await self._join()
        await self._stores.best_effort.keep(self._place, self._record)
        yield encoder.encode([*events, writer.last()])

    def failed(self, error: Exception) -> bytes:
        """All events of a stream whose headers were sent while it waited, and that the engine refused then."""
        if self._stream is None:
            raise RuntimeError("a stream cannot fail before its events are asked for")
        writer, encoder = self._stream
        events = writer.start()
        writer.fail(error)
        return encoder.encode([*events, writer.last()])

    async def complete(self, generation: Generation, _: ChatRequest) -> Response:
        """The response in one piece."""
        writer = self._writer(generation)
        await self._generate(writer, generation)
        await self._join()
        await self._stores.best_effort.keep(self._place, self._record)
        response = self._record.response
        return json_response(response, response["adapter"])

    def work(self, generation: Generation, reservations: tuple[Reservation, ...]) -> Work:
        """The response as work in the background."""
        writer = self._writer(generation)
        return Work(
            self._place,
            self._record,
            generate=lambda: self._generate_and_join(writer, generation),
            fail=writer.fail,
            reservations=reservations,
        )

    async def _generate_and_join(self, writer: ResponseWriter, generation: Generation) -> None:
        await self._generate(writer, generation)
        await self._join()

    async def _join(self) -> None:
        """Adds input and answer to the conversation, if there is an answer."""
        if self._turn is not None:
            await self._turn.end(self._record)

    async def _generate(self, writer: ResponseWriter, generation: Generation) -> None:
        begun = False
        try:
            async with aclosing(generation.steps()) as steps:
                async for step in steps:
                    if not begun:
                        writer.start()
                    begun = True
                    writer.add(step)
        except TemperError as error:
            self._chat.rename(error)
            raise
        writer.end()

    def _writer(self, generation: Generation) -> ResponseWriter:
        return ResponseWriter(self._record.response, self._body, self._chat.offers, generation)
