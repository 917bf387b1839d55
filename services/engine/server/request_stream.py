"""Stream of a client: requests become submissions of the loop, updates become frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace

import structlog

from services.common.errors import ENGINE_FAULT, InvalidRequest, TemperError, Unavailable
from services.common.pb import engine_pb2 as pb
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.submission import Submission
from services.engine.server.protobuf import submission, update_message
from services.engine.server.serving import Serving

_MAX_BACKLOG = 65536
"""Most unread updates of a stream before it is closed."""
_MOST_HEARD = 1024
"""Most prompts of others that wait for a stream's next frame; the status tells of all."""

log = structlog.get_logger(__name__)


class RequestStream:
    """Stream of one client: its requests and their updates. It is the sink that the loop thread calls.

    Args:
        hears: it has frames of what others' requests are to the engine, too.
    """

    def __init__(self, serving: Serving, *, hears: bool) -> None:
        self._serving = serving
        self._events = asyncio.get_running_loop()
        self._pending: deque[list[SequenceUpdate]] = deque()
        self._backlog = 0
        self._arrived = asyncio.Event()
        self._live = serving.loads.open(self._hear if hears else None)
        self._heard: deque[bytes] = deque(maxlen=_MOST_HEARD)
        """Prompts of others that no frame has told of."""
        self._compiling: dict[str, asyncio.Task[None]] = {}
        """Live requests whose constraint is being compiled; the loop does not have them yet."""
        self._closed = False
        self._overrun = False

    def __call__(self, updates: list[SequenceUpdate]) -> None:
        self._events.call_soon_threadsafe(self._step_done, updates)

    def _step_done(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason is None:
                self._live.begun(update.request_id)
            else:
                self._live.ended(update.request_id)
        self._receive(updates)

    def _receive(self, updates: list[SequenceUpdate]) -> None:
        self._pending.append(updates)
        self._backlog += len(updates)
        self._overrun = self._overrun or self._backlog > _MAX_BACKLOG
        self._arrived.set()

    def close(self) -> None:
        """Records that no more submissions follow."""
        self._closed = True
        self._arrived.set()

    def abort_all(self) -> None:
        for task in self._compiling.values():
            task.cancel()
        self._serving.loop.abort_all(self)
        self._live.close()

    def _hear(self, hashes: bytes) -> None:
        """Others' load has changed by much, by a prompt if hashes are given."""
        if hashes:
            self._heard.append(hashes)
        if not self._pending:
            self._receive([])

    def frame(self, updates: list[SequenceUpdate]) -> pb.EngineFrame:
        """Updates with what is new of others."""
        heard = tuple(self._heard)
        self._heard.clear()
        return pb.EngineFrame(
            updates=[update_message(update) for update in updates], others=self._live.others.message, prompts=heard
        )

    def submit(self, message: pb.GenerateRequest) -> None:
        """Hands a request to the loop once its constraint is compiled. If it is refused, the error is its only
        update."""
        name = message.request_id
        try:
            if name in self._live:
                raise InvalidRequest(f"request_id {name!r} is in use", param="request_id")
            asked = submission(message, self._serving.model.vocab_size)
            if asked.sampling.masked:
                self._compiling[name] = asyncio.create_task(self._compile(asked))
            else:
                self._serving.loop.submit(asked, self)
        except Exception as error:
            self._receive([_refusal(name, error)])
        else:
            self._live.submitted(message)
            self._serving.prompts.note(message.prefix_hashes)

    async def _compile(self, asked: Submission) -> None:
        """Compiles the constraint of a request and hands it to the loop."""
        name = asked.request_id
        try:
            matcher = await self._serving.constraints.matcher(asked.sampling)
            self._serving.loop.submit(replace(asked, matcher=matcher), self)
        except Exception as error:
            self._step_done([_refusal(name, error)])
        finally:
            if self._compiling.get(name) is asyncio.current_task():
                del self._compiling[name]

    def abort(self, message: pb.AbortRequest) -> None:
        """Ends a request of this client; with keep_tokens its rollout is kept, cut where the gateway ended the text."""
        task = self._compiling.pop(message.request_id, None)
        if task is not None:
            task.cancel()
            self._step_done([SequenceUpdate(message.request_id, finish_reason=FinishReason.ABORT)])
            return
        if message.request_id in self._live or message.keep_tokens:
            on_kept = self if message.keep_tokens else None
            self._serving.loop.abort(message.request_id, message.keep_tokens, on_kept)

    async def frames(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Updates of each step, until the client is done and its requests have ended.

        Raises:
            Unavailable: the client reads too slowly.
        """
        while True:
            while self._pending:
                updates = self._pending.popleft()
                self._backlog -= len(updates)
                if self._overrun:
                    raise Unavailable(f"more than {_MAX_BACKLOG} updates were left unread")
                yield updates
            if self._closed and not self._live:
                return
            self._arrived.clear()
            await self._arrived.wait()


def _refusal(name: str, error: Exception) -> SequenceUpdate:
    """Update for a request that could not be submitted. A bug is reported like any other error, so that it does not end
    the gateway's other requests."""
    if not isinstance(error, TemperError):
        log.error("request could not be submitted", request=name, exc_info=error)
        error = TemperError(f"{ENGINE_FAULT} ({type(error).__name__})")
    return SequenceUpdate(name, finish_reason=FinishReason.ERROR, error=error)


async def read(frames: AsyncIterable[pb.ClientFrame], stream: RequestStream) -> None:
    """Gives a stream what its client sends, until that is all."""
    try:
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            if kind == "submit":
                stream.submit(frame.submit)
            elif kind == "abort":
                stream.abort(frame.abort)
    finally:
        stream.close()
