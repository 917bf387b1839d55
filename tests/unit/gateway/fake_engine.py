"""A real gRPC server that answers with scripted tokens in place of a model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from services.common.pb import (
    adapters_pb2,
    adapters_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    histories_pb2_grpc,
    sessions_pb2_grpc,
)
from services.common.shutdown import ASLEEP
from services.engine.server.conversation_session_service import ConversationSessionService
from tests.unit.engine.server.memory_sessions import MemorySessions
from tests.unit.gateway.fake_sessions import FakeSessions
from tests.unit.gateway.tokens import EOS, VOCAB_SIZE, codec

Send = Callable[[engine_pb2.Update], Awaitable[None]]
Behaviour = Callable[["FakeEngine", engine_pb2.GenerateRequest, Send], Awaitable[None]]


def says(text: str | list[int], *, per_update: int = 1, ends: bool = True, pause: float = 0.0) -> Behaviour:
    """Answers with the text (or these tokens) and then the end token, within max_tokens."""

    async def behave(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        tokens = engine.codec.encode(text) if isinstance(text, str) else list(text)
        tokens = [*tokens, EOS] if ends else tokens
        limit = request.sampling.max_tokens
        reason = engine_pb2.FINISH_REASON_STOP if ends and len(tokens) <= limit else engine_pb2.FINISH_REASON_LENGTH
        tokens = tokens[:limit]
        for start in range(0, len(tokens), per_update):
            part = tokens[start : start + per_update]
            update = engine_pb2.Update(request_id=request.request_id, token_ids=part)
            update.sampling_logprobs.extend([-0.25] * len(part))
            if request.sampling.HasField("top_logprobs"):
                update.logprobs.extend([-0.5] * len(part))
                width = request.sampling.top_logprobs
                for token in part:
                    ids = [token, *(other for other in range(97, 120) if other != token)][:width]
                    tops = engine_pb2.TopLogprobs(token_ids=ids, logprobs=[-0.5 - i for i in range(len(ids))])
                    update.top_logprobs.append(tops)
            if start == 0:
                update.adapter = engine.adapter_of(request)
                update.cached_tokens = engine.cached_tokens
            if start + per_update >= len(tokens):
                update.finish_reason = reason
            await send(update)
            await asyncio.sleep(pause)

    return behave


def fails(
    code: engine_pb2.ErrorCode, message: str, *, after: str = "", param: str = "", exhausted: bool = False
) -> Behaviour:
    """Answers with an error, after some text."""

    async def behave(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        for token in engine.codec.encode(after):
            await send(engine_pb2.Update(request_id=request.request_id, token_ids=[token]))
        error = engine_pb2.Error(code=code, message=message, param=param, exhausted=exhausted)
        reason = engine_pb2.FINISH_REASON_ERROR
        await send(engine_pb2.Update(request_id=request.request_id, finish_reason=reason, error=error))

    return behave


def dies(*, after: str = "") -> Behaviour:
    """Says something and then loses the whole stream."""

    async def behave(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        for token in engine.codec.encode(after):
            await send(engine_pb2.Update(request_id=request.request_id, token_ids=[token]))
        await asyncio.sleep(0.05)
        engine.break_streams()

    return behave


async def hangs(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
    """Never answers."""
    await asyncio.Event().wait()


@dataclass(eq=False)
class FakeEngine(engine_pb2_grpc.EngineServicer, adapters_pb2_grpc.AdaptersServicer):
    """One engine. Everything is used from its event loop, except that tests read the lists and set the fields."""

    behaviour: Behaviour = field(default_factory=lambda: says("Hello, world"))
    credentials: grpc.ServerCredentials | None = None
    """For TLS."""
    max_model_len: int = 512
    paused: float = 0.0
    """Longest time of a pause, seconds; 0: there is none."""
    max_train_tokens: int = 256
    attached: str = ""
    cached_tokens: int = 0
    draining: bool = False
    rejects: str = ""
    keep_after: float | None = 0.0
    """Seconds until it says that it has kept a rollout; None: it never does."""
    tells_kept: bool = True
    composes: bool = True
    sleeps: bool = True
    asleep: bool = False
    sleep_level: str = ""
    memory_taken: bool = False
    dies_on_abort: bool = False
    digest: str = "d" * 64
    name: str = ""
    """What it calls itself."""
    max_lora_rank: int = 16
    linear_layers: Sequence[str] = ()
    """Empty: like an engine of an earlier release, it does not say which there are."""
    memory_plan: Mapping[str, int] = field(default_factory=dict)
    adapter_slots: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its status that are others than usual."""
    silent: bool = False
    """True: it does not answer when asked for its status."""
    lists_requests: bool = True
    """False: like an engine of an earlier release, it has no such call."""
    keeps_logs: bool = True
    """The same."""
    break_logs: bool = False
    """True: it fails where it is asked for its log."""
    breaks_with: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    """Status of a stream that breaks."""
    fails_calls: grpc.StatusCode | None = None
    """Status of every call but the stream and those that a gateway connects by; None: they are answered."""
    webhooks: engine_pb2.RewardWebhooks | None = None
    """What jobs may have scored where; None: it does not say."""

    def __post_init__(self) -> None:
        self.codec = codec()
        self.requests: list[engine_pb2.GenerateRequest] = []
        self.log: list[engine_pb2.LogLine] = []
        self.asked_logs: list[engine_pb2.GetLogsRequest] = []
        self.aborts: list[tuple[str, int]] = []
        self.kept: list[str] = []
        self.rollouts: dict[str, engine_pb2.Rollout] = {}
        self.syncs = 0
        self.running: dict[str, asyncio.Task[None]] = {}
        self.port = 0
        self.sessions = FakeSessions(secrets.token_hex(6))
        self.histories = MemorySessions()
        self._history_service = ConversationSessionService(self.histories)
        self._server: aio.Server | None = None
        self._streams: set[asyncio.Queue[engine_pb2.EngineFrame | None]] = set()

    def adapter_of(self, request: engine_pb2.GenerateRequest) -> str:
        """The version that answers."""
        kind = request.adapter.WhichOneof("ref")
        if kind == "composition":
            members = request.adapter.composition.members
            return "+".join(f"{one.adapter.name}@{one.adapter.version or 1}*{one.scale:g}" for one in members)
        if kind == "named":
            return f"{request.adapter.named.name}@{request.adapter.named.version or 1}"
        return self.attached if request.adapter.attached else ""

    async def start(self, port: int = 0) -> None:
        self._server = aio.server(interceptors=[_Failing(self)])
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        adapters_pb2_grpc.add_AdaptersServicer_to_server(self, self._server)
        sessions_pb2_grpc.add_SessionsServicer_to_server(self.sessions, self._server)
        histories_pb2_grpc.add_HistoriesServicer_to_server(self._history_service, self._server)
        listen = f"127.0.0.1:{port}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(listen)
        else:
            self.port = self._server.add_secure_port(listen, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def break_streams(self) -> None:
        """Ends every stream, as a dying process does."""
        for outgoing in self._streams:
            outgoing.put_nowait(None)

    @property
    def connected(self) -> bool:
        """A stream is open: gateways may know that a moment before."""
        return bool(self._streams)

    def tell(self, frame: engine_pb2.EngineFrame) -> None:
        """Sends a frame of its own to every stream."""
        for outgoing in self._streams:
            outgoing.put_nowait(frame)

    # -- Engine

    async def Stream(self, request_iterator, context) -> AsyncIterator[engine_pb2.EngineFrame]:  # noqa: N802
        outgoing: asyncio.Queue[engine_pb2.EngineFrame | None] = asyncio.Queue()
        self._streams.add(outgoing)
        mine: set[str] = set()
        keeping: list[asyncio.Task[None]] = []

        async def send(update: engine_pb2.Update) -> None:
            await outgoing.put(engine_pb2.EngineFrame(updates=[update]))

        async def keep(request_id: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            self.kept.append(request_id)
            await send(engine_pb2.Update(request_id=request_id, kept=True))

        async def read() -> None:
            async for frame in request_iterator:
                if frame.WhichOneof("frame") == "submit":
                    request = frame.submit
                    self.requests.append(request)
                    mine.add(request.request_id)
                    self.running[request.request_id] = asyncio.create_task(self._run(request, self.behaviour, send))
                else:
                    self.aborts.append((frame.abort.request_id, frame.abort.keep_tokens))
                    if (task := self.running.get(frame.abort.request_id)) is not None:
                        task.cancel()
                    if self.dies_on_abort:
                        self.break_streams()
                    elif frame.abort.keep_tokens and self.keep_after is not None and self.tells_kept:
                        keeping.append(asyncio.create_task(keep(frame.abort.request_id, self.keep_after)))

        reader = asyncio.create_task(read())
        try:
            while (frame := await outgoing.get()) is not None:
                yield frame
            await context.abort(self.breaks_with, "the engine died")
        finally:
            reader.cancel()
            self._streams.discard(outgoing)
            for request_id in mine:
                if (task := self.running.get(request_id)) is not None:
                    task.cancel()

    async def _run(self, request: engine_pb2.GenerateRequest, behaviour: Behaviour, send: Send) -> None:
        try:
            await behaviour(self, request, send)
        finally:
            self.running.pop(request.request_id, None)

    async def GetModel(self, request, context) -> engine_pb2.Model:  # noqa: N802
        if self.asleep:
            await context.abort(grpc.StatusCode.UNAVAILABLE, ASLEEP)
        return engine_pb2.Model(
            name="tiny",
            digest=self.digest,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            max_train_tokens=self.max_train_tokens,
            max_lora_rank=self.max_lora_rank,
            tokenizer_digest=self.codec.digest,
            tells_kept=self.tells_kept,
            composes=self.composes,
            adapter_slots=self.adapter_slots,
            engine=self.name,
            linear_layers=self.linear_layers,
            webhooks=self.webhooks,
        )

    async def GetTokenizerFiles(self, request, context) -> AsyncIterator[engine_pb2.FileChunk]:  # noqa: N802
        for name, data in self.codec.files.items():
            for start in range(0, len(data), 1000):
                yield engine_pb2.FileChunk(name=name, data=data[start : start + 1000])

    async def Pause(self, request, context) -> engine_pb2.PauseResponse:  # noqa: N802
        self.paused = request.seconds
        return engine_pb2.PauseResponse()

    async def Resume(self, request, context) -> engine_pb2.ResumeResponse:  # noqa: N802
        self.paused = 0.0
        return engine_pb2.ResumeResponse()

    async def Sleep(self, request, context) -> engine_pb2.SleepResponse:  # noqa: N802
        if not self.sleeps:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if request.level not in ("", "cache", "process"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "its levels are cache, process")
        was, self.asleep = self.asleep, True
        if not was:
            self.sleep_level = request.level
        return engine_pb2.SleepResponse(asleep=was)

    async def Wake(self, request, context) -> engine_pb2.WakeResponse:  # noqa: N802
        if self.memory_taken:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "somebody else has the memory")
        was, self.asleep = self.asleep, False
        return engine_pb2.WakeResponse(asleep=was)

    async def GetStatus(self, request, context) -> engine_pb2.EngineStatus:  # noqa: N802
        if self.silent:
            await asyncio.Event().wait()
        usual = engine_pb2.EngineStatus(
            paused=self.paused > 0,
            running=len(self.running),
            draining=self.draining,
            asleep=self.asleep,
            sleep_level=self.sleep_level,
            attached_adapter=self.attached,
            loaded_adapters=[self.attached] if self.attached else [],
            instance=self.sessions.instance,
            sessions_open=len(self.sessions.opened),
            sessions_max=4,
            memory_plan=self.memory_plan,
            decode_tokens=40,
            prefill_tokens=30,
            prompt_tokens=50,
            cache_hit_tokens={"device": 15, "host": 5},
            blocks_used=1,
            blocks_cached=2,
            blocks_total=3,
        )
        for name, value in self.status.items():
            usual.ClearField(name)
            usual.MergeFrom(engine_pb2.EngineStatus(**{name: value}))
        return usual

    async def GetRequests(self, request, context) -> engine_pb2.GetRequestsResponse:  # noqa: N802
        if not self.lists_requests:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        live = [
            engine_pb2.LiveRequest(
                request_id=one.request_id,
                owner=one.owner,
                phase=engine_pb2.REQUEST_PHASE_WAITING,
                prompt_tokens=len(one.prompt_token_ids),
            )
            for one in self.requests
            if one.request_id in self.running
        ]
        return engine_pb2.GetRequestsResponse(requests=live)

    async def GetLogs(self, request, context) -> engine_pb2.GetLogsResponse:  # noqa: N802
        self.asked_logs.append(request)
        if not self.keeps_logs:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.break_logs:
            await context.abort(grpc.StatusCode.INTERNAL, "a fault")
        process, last = self.sessions.instance, max((line.number for line in self.log), default=0)
        new = [line for line in self.log if request.process != process or line.number > request.after]
        return engine_pb2.GetLogsResponse(process=process, lines=new, last=last)

    async def GetRollouts(self, request, context) -> engine_pb2.GetRolloutsResponse:  # noqa: N802
        known = [self.rollouts[i] for i in request.completion_ids if i in self.rollouts]
        sessions = {(session.owner, session.name) for session in request.sessions}
        known += [one for one in self.rollouts.values() if one.session and (one.owner, one.session) in sessions]
        missing = [i for i in request.completion_ids if i not in self.rollouts]
        return engine_pb2.GetRolloutsResponse(rollouts=known, missing=missing)

    # -- Adapters

    async def Sync(self, request, context) -> adapters_pb2.SyncResponse:  # noqa: N802
        self.syncs += 1
        return adapters_pb2.SyncResponse(attached=self.attached)

    async def Validate(self, request_iterator, context) -> adapters_pb2.ValidateResponse:  # noqa: N802
        names = {chunk.name async for chunk in request_iterator}
        if self.rejects:
            code = engine_pb2.ERROR_CODE_ADAPTER_REJECTED
            return adapters_pb2.ValidateResponse(error=engine_pb2.Error(code=code, message=self.rejects))
        return adapters_pb2.ValidateResponse(rank=4, parameters=len(names))


class _Failing(aio.ServerInterceptor):
    """Ends calls with the status that the engine says."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or self._engine.fails_calls is None or method in ("Stream", "GetModel", "GetStatus"):
            return handler

        async def ended(_: Any, context: Any) -> None:
            await context.abort(self._engine.fails_calls, "Received RST_STREAM with error code 2")

        async def stream_ended(request: Any, context: Any) -> AsyncIterator[Any]:
            await ended(request, context)
            yield

        makers = {
            (False, False): (grpc.unary_unary_rpc_method_handler, ended),
            (False, True): (grpc.unary_stream_rpc_method_handler, stream_ended),
            (True, False): (grpc.stream_unary_rpc_method_handler, ended),
        }
        make, behave = makers[handler.request_streaming, handler.response_streaming]
        return make(behave, handler.request_deserializer, handler.response_serializer)
