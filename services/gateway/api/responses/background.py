"""Responses that go on without a connection, each in a task of the gateway that took it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from services.common.errors import InvalidRequest, Overloaded, PayloadTooLarge, TemperError, Unavailable
from services.gateway.api.responses.store.record import Record
from services.gateway.api.responses.store.store import Place, ResponseStore
from services.gateway.core.admission import Admission, Reservation
from services.gateway.core.client_disconnect import cancel_and_wait
from services.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

_SAVE_PAUSE = 1.0
_STOP_SECONDS = 3.0
"""How long the answers of interrupted responses may take to be written when the gateway stops."""


@dataclass(slots=True)
class Work:
    """One background response.

    Args:
        place: where it is kept.
        record: kept up to date by ``generate``.
        generate: runs the model to its end.
        fail: writes into the record why it did not come there.
        reservations: given back when the model has ended.
    """

    place: Place
    record: Record
    generate: Callable[[], Coroutine[Any, Any, None]]
    fail: Callable[[Exception], None]
    reservations: tuple[Reservation, ...]
    ended: bool = False
    """The model has; what is left is to write it down."""


class BackgroundResponses:
    """All of one gateway. Used from its event loop only.

    Args:
        store: where they are kept.
        settings: their number, beats and lease, and how long they may go on when the gateway stops.
        stopping: set when it does.
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
        """Begins to beat, and to wait for the end."""
        self._beating = asyncio.create_task(self._beat())
        self._draining = asyncio.create_task(self._drain())

    def reserve(self) -> Reservation:
        """A place for one more.

        Raises:
            InvalidRequest: this gateway has none.
            Overloaded: there is none now.
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
        """Runs a response that is stored already."""
        task = asyncio.create_task(self._run(work))
        self._tasks[work.place.id] = work, task
        if self._interrupted:
            task.cancel()  # it came too late
        task.add_done_callback(lambda _: self._tasks.pop(work.place.id, None))

    def cancel(self, response_id: str) -> None:
        """Ends a response at once, if it runs here. That it was cancelled is stored already."""
        known = self._tasks.get(response_id)
        if known is not None and not known[0].ended:
            known[1].cancel()

    async def stop(self) -> None:
        """Returns when all have ended: those that did not by the end of the gateway's grace are stored as failed."""
        if self._draining is not None:
            await self._draining
            await self._wait(_STOP_SECONDS)
        if self._beating is not None:
            await cancel_and_wait(self._beating)

    async def _drain(self) -> None:
        # From the signal on, not only when the last connection is closed: both have the same time.
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
                return  # the client wanted it so, or the response is not kept any more
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
        """Stores the end. While Redis is away it is tried again, as long as nobody may call the response lost."""
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
