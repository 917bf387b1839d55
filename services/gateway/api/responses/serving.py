"""Running the generation of a response: as a stream, in one piece, or in the background.

Background responses go on without a connection, each in a task of the gateway that took it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from fastapi import Query
from starlette.responses import Response

from services.common.errors import InvalidRequest, Overloaded, PayloadTooLarge, TemperError, Unavailable
from services.common.shutdown import cancel_and_wait
from services.gateway.api.base.routing import provided
from services.gateway.api.base.serving import json_response
from services.gateway.api.responses.documents import DocumentStore, Turn
from services.gateway.api.responses.response_object import Record
from services.gateway.api.responses.store import BestEffortStore, Place, ResponseStore
from services.gateway.api.responses.streaming import EventEncoder, ResponseWriter
from services.gateway.api.responses.to_chat import ChatFields
from services.gateway.core.admission import Admission, Reservation
from services.gateway.inference.generation import Generation
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.responses.request import Include, ResponseRequest
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

_SAVE_PAUSE = 1.0
_STOP_SECONDS = 3.0
"""Longest time that the answers of interrupted responses may take to be written when the gateway stops."""


Included = Annotated[
    list[Include] | None,
    Query(alias="include[]", description="Accepted and ignored: what is kept has nothing that it could add."),
]


@dataclass(slots=True)
class Work:
    """One background response.

    Args:
        place: of the response in the store.
        record: kept up to date by ``generate``.
        generate: runs the model to its end.
        fail: writes into the record why the model did not get there.
        reservations: given back when the model has ended.
    """

    place: Place
    record: Record
    generate: Callable[[], Coroutine[Any, Any, None]]
    fail: Callable[[Exception], None]
    reservations: tuple[Reservation, ...]
    ended: bool = False
    """True once the model has ended, and only the end of the response is still to be stored."""


class BackgroundResponses:
    """Background responses of one gateway. Used from its event loop only.

    Args:
        store: of responses.
        settings: their number, heartbeats and lease, and how long they may go on when the gateway stops.
        stopping: set when the gateway begins to stop.
    """

    def __init__(self, store: ResponseStore, settings: GatewaySettings, stopping: asyncio.Event) -> None:
        self._store = store
        self._settings = settings
        self._stopping = stopping
        self._places = Admission(settings.max_background_responses)
        self._tasks: dict[str, tuple[Work, asyncio.Task[None]]] = {}
        self._beating: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._interrupted = False

    @property
    def running(self) -> int:
        """Background responses in this gateway."""
        return len(self._tasks)

    def start(self) -> None:
        """Starts the heartbeats, and the wait for the gateway's stop."""
        self._beating = asyncio.create_task(self._beat())
        self._draining = asyncio.create_task(self._drain())

    def reserve(self) -> Reservation:
        """Reserves a place for one more response.

        Raises:
            InvalidRequest: this gateway has no places.
            Overloaded: no place is free now.
            Unavailable: the gateway is stopping.
        """
        if self._stopping.is_set():
            raise Unavailable("this gateway is stopping: send the request again", retry_after=1.0)
        limit = self._settings.max_background_responses
        if limit == 0:
            raise InvalidRequest("there are no background responses here: leave background out", param="background")
        if self._places.in_flight >= limit:
            raise Overloaded(
                f"this gateway runs {self._places.in_flight} background responses and the limit is {limit}: try again "
                "when some have ended, or leave background out",
                retry_after=5.0,
            )
        return self._places.reserve(1)

    def begin(self, work: Work) -> None:
        """Begins to run a response that is stored already."""
        task = asyncio.create_task(self._run(work))
        self._tasks[work.place.id] = work, task
        if self._interrupted:
            task.cancel()  # it came after the others were interrupted
        task.add_done_callback(lambda _: self._tasks.pop(work.place.id, None))

    def cancel(self, response_id: str) -> None:
        """Ends a response at once, if it runs here. That it was cancelled is stored already."""
        known = self._tasks.get(response_id)
        if known is not None and not known[0].ended:
            known[1].cancel()

    async def stop(self) -> None:
        """Waits until all have ended. Those that have not by the end of the gateway's grace are stored as failed."""
        if self._draining is not None:
            await self._draining
            await self._wait(_STOP_SECONDS)
        if self._beating is not None:
            await cancel_and_wait(self._beating)

    async def _drain(self) -> None:
        # The grace begins with the signal, not when the last connection is closed: both have the same time.
        await self._stopping.wait()
        await self._wait(self._settings.shutdown_grace_seconds)
        self._interrupted = True
        for work, task in self._tasks.values():
            if not work.ended:
                task.cancel()
        await self._wait(_STOP_SECONDS)
        for _, task in list(self._tasks.values()):
            await cancel_and_wait(task)

    async def _wait(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait([task for _, task in self._tasks.values()], timeout=seconds)

    async def _run(self, work: Work) -> None:
        try:
            await work.generate()
        except asyncio.CancelledError:
            if not self._interrupted:
                return  # the client cancelled it, or the response is not kept any more
            work.fail(Unavailable("the gateway was stopped before the response was finished: send it again"))
        except TemperError as error:
            work.fail(error)
        except Exception as error:
            log.exception("background response failed", response=work.place.id)
            work.fail(error)
        finally:
            work.ended = True
            for reservation in work.reservations:
                reservation.release()
        await self._write(work)

    async def _write(self, work: Work) -> None:
        """Stores the end of a response. While Redis is away it tries again, until its lease is over and others may call
        it lost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.response_lease_seconds
        while True:
            try:
                await self._store.save(work.place, work.record, only_active=True)
                return
            except PayloadTooLarge as error:
                work.record.response["output"] = []
                work.fail(error)
            except Unavailable as error:
                if self._interrupted or loop.time() > deadline:
                    log.error("a background response could not be stored", response=work.place.id, error=error.message)
                    return
                await asyncio.sleep(_SAVE_PAUSE)

    async def _beat(self) -> None:
        heard = True
        while True:
            await asyncio.sleep(self._settings.response_beat_seconds)
            works = [work for work, _ in self._tasks.values() if not work.ended]
            if not works:
                continue
            try:
                wanted = await self._store.beat([(work.place, work.record.status) for work in works])
                heard = True
            except Unavailable as error:
                if heard:
                    log.warning("background responses cannot be reported", error=error.message, running=len(works))
                heard = False
                continue
            for work, wants in zip(works, wanted, strict=True):
                if not wants:
                    self.cancel(work.place.id)


@dataclass(frozen=True, slots=True)
class ResponseServices:
    """Stores of responses, chats and conversations, and the responses that run in the background."""

    responses: ResponseStore
    documents: DocumentStore
    """Store of chats and conversations."""
    best_effort: BestEffortStore
    background: BackgroundResponses


Responses = Annotated[ResponseServices, provided(ResponseServices)]


class Answering:
    """Answering of one Responses request: as a stream, in one piece, or in the background.

    Args:
        stores: of responses and conversations.
        body: the request.
        chat: the chat request that was made of it.
        place: of the response in the store.
        record: the response object before the model begins, and the items that it is given.
        turn: adds input and answer to a conversation; None: there is none.
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
        """Encoded events of a stream. An error of the engine before its first token is raised; a later one is an event,
        and the response is kept as failed."""
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
        """All events of a stream that the engine refused after the headers had been sent."""
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
