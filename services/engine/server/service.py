"""gRPC services of the engine. One asyncio thread; the loop hands it the updates of a step with one call for each
stream.

Nothing here computes: requests become submissions of the loop, updates become frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any, TypeAlias, cast

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from services.common.adapters.manifest import kind_of
from services.common.errors import InvalidRequest, TemperError
from services.common.pb import adapters_pb2, adapters_pb2_grpc, engine_pb2_grpc
from services.common.pb import engine_pb2 as pb
from services.common.shutdown import SleepLevel
from services.common.telemetry.tracing import NO_TRACER, Tracer
from services.engine.observability.call_traces import CallTraces
from services.engine.requests.conversation_session import SessionName
from services.engine.server.errors import status_code, to_message
from services.engine.server.protobuf import (
    live_request_message,
    log_line_message,
    log_query,
    rollout_message,
    update_message,
)
from services.engine.server.request_stream import RequestStream, read
from services.engine.server.serving import Serving

_CHUNK_BYTES = 1024 * 1024
_MAX_ADAPTER_BYTES = 4 * 1024**3
_SYNC_SECONDS = 60.0

_Context: TypeAlias = "aio.ServicerContext[Any, Any]"


_MOST_PAUSED_SECONDS = 3600.0


class EngineService(engine_pb2_grpc.EngineServicer):
    """gRPC service temper.v1.Engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Stream(  # noqa: N802 - the protocol's name
        self, request_iterator: AsyncIterable[pb.ClientFrame], context: _Context
    ) -> AsyncIterator[pb.EngineFrame]:
        stream = RequestStream(self._serving, hears=True)
        await context.send_initial_metadata(())
        reader = asyncio.create_task(read(request_iterator, stream))
        try:
            async for updates in stream.frames():
                yield stream.frame(updates)
        except TemperError as error:
            await context.abort(status_code(error), error.message)
        finally:
            reader.cancel()
            stream.abort_all()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.Update]:
        stream = RequestStream(self._serving, hears=False)
        remaining = context.time_remaining()
        if remaining is not None and not (request.deadline_unix_ms or request.timeout_ms):
            request.timeout_ms = max(1, int(remaining * 1000))
        try:
            stream.submit(request)
            stream.close()
            async for updates in stream.frames():
                for update in updates:
                    if update.error is not None:
                        await context.abort(status_code(update.error), to_message(update.error).message)
                    yield update_message(update)
        finally:
            stream.abort_all()

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.Model:  # noqa: N802, ARG002
        return self._serving.model

    async def GetTokenizerFiles(  # noqa: N802
        self,
        request: pb.GetTokenizerFilesRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[pb.FileChunk]:
        for name, data in self._serving.codec.files.items():
            for start in range(0, max(len(data), 1), _CHUNK_BYTES):
                yield pb.FileChunk(name=name, data=data[start : start + _CHUNK_BYTES])

    async def Pause(self, request: pb.PauseRequest, context: _Context) -> pb.PauseResponse:  # noqa: N802
        if not 0 < request.seconds <= _MOST_PAUSED_SECONDS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a pause of {request.seconds} s: at most {_MOST_PAUSED_SECONDS:.0f} s, and more than 0",
            )
        await asyncio.wrap_future(self._serving.loop.pause(request.seconds))
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: _Context) -> pb.ResumeResponse:  # noqa: N802, ARG002
        await asyncio.wrap_future(self._serving.loop.resume())
        return pb.ResumeResponse()

    async def GetStatus(  # noqa: N802
        self,
        request: pb.GetStatusRequest,
        context: _Context,  # noqa: ARG002
    ) -> pb.EngineStatus:
        serving = self._serving
        prompts = serving.prompts.after(request.prompts_after) if request.HasField("prompts_after") else ()
        status = serving.loop.status()
        counts = status.counts
        adapters = serving.adapters.snapshot()
        instance, sessions_open, sessions_max = serving.sessions()
        return pb.EngineStatus(
            paused=status.paused,
            running=counts.running,
            waiting=counts.waiting + status.waiting_for_adapters,
            blocks_used=counts.blocks_used,
            blocks_total=counts.blocks_total,
            blocks_cached=counts.blocks_cached,
            slots_used=counts.slots_used,
            slots_total=counts.slots_total,
            draining=not status.accepting,
            job_id=serving.job_id(),
            loaded_adapters=[loaded.pin.version for loaded in adapters.loaded],
            attached_adapter=adapters.attached,
            max_waiting=serving.max_waiting,
            instance=instance,
            sessions_open=sessions_open,
            sessions_max=sessions_max,
            memory_plan=serving.memory,
            decode_tokens=serving.usage.decode_tokens,
            prefill_tokens=serving.usage.prefill_tokens,
            prompt_tokens=serving.usage.prompt_tokens,
            cache_hit_tokens=dict(serving.usage.cache_hit_tokens),
            slots_cached=counts.slots_cached,
            serving_adapters=adapters.serving,
            waiting_adapters=adapters.waiting,
            block_size=serving.block_size,
            prompts=prompts,
            prompts_seen=serving.prompts.seen,
            load=serving.loads.total.message,
        )

    async def GetRequests(  # noqa: N802
        self,
        request: pb.GetRequestsRequest,  # noqa: ARG002
        context: _Context,
    ) -> pb.GetRequestsResponse:
        try:
            live = await asyncio.wrap_future(self._serving.loop.live_requests())
        except TemperError as error:
            await context.abort(status_code(error), error.message)
        return pb.GetRequestsResponse(requests=map(live_request_message, live))

    async def GetLogs(  # noqa: N802
        self, request: pb.GetLogsRequest, context: _Context
    ) -> pb.GetLogsResponse:
        try:
            query = log_query(request)
        except TemperError as error:
            await context.abort(status_code(error), error.message)
        recent = self._serving.recent
        after = request.after if request.process == recent.process else 0
        lines, last = recent.find(query, after)
        return pb.GetLogsResponse(process=recent.process, lines=map(log_line_message, lines), last=last)

    async def GetRollouts(  # noqa: N802
        self,
        request: pb.GetRolloutsRequest,
        context: _Context,  # noqa: ARG002
    ) -> pb.GetRolloutsResponse:
        found, missing = self._serving.loop.rollouts.get(request.completion_ids)
        known = {rollout.completion_id: rollout for rollout in found}
        if request.sessions:
            asked = [SessionName(session.owner, session.name) for session in request.sessions]
            known |= {one.completion_id: one for one in self._serving.loop.rollouts.of_sessions(asked)}
        return pb.GetRolloutsResponse(rollouts=[rollout_message(one) for one in known.values()], missing=missing)

    async def Sleep(self, request: pb.SleepRequest, context: _Context) -> pb.SleepResponse:  # noqa: N802
        if self._serving.sleep is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine cannot sleep: it is a part of a process")
        try:
            self._serving.sleep(cast(SleepLevel, request.level or "process"))
        except InvalidRequest as error:
            await context.abort(status_code(error), error.message)
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: _Context) -> pb.WakeResponse:  # noqa: N802, ARG002
        return pb.WakeResponse()


class AdaptersService(adapters_pb2_grpc.AdaptersServicer):
    """gRPC service temper.v1.Adapters."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def Sync(  # noqa: N802
        self,
        request: adapters_pb2.SyncRequest,  # noqa: ARG002
        context: _Context,
    ) -> adapters_pb2.SyncResponse:
        adapters = self._serving.adapters
        remaining = context.time_remaining()
        timeout = _SYNC_SECONDS if remaining is None else min(remaining, _SYNC_SECONDS)
        try:
            await asyncio.to_thread(adapters.sync, None, timeout)
        except TemperError as error:
            await context.abort(status_code(error), error.message)
        snapshot = adapters.snapshot()
        return adapters_pb2.SyncResponse(
            attached=snapshot.attached,
            loaded=[
                adapters_pb2.LoadedAdapter(
                    version=loaded.pin.version,
                    digest=loaded.pin.digest,
                    slot=loaded.pin.slot,
                    requests=loaded.requests,
                )
                for loaded in snapshot.loaded
            ],
        )

    async def Validate(  # noqa: N802
        self, request_iterator: AsyncIterable[pb.FileChunk], context: _Context
    ) -> adapters_pb2.ValidateResponse:
        files: dict[str, bytearray] = {}
        size = 0
        async for chunk in request_iterator:
            size += len(chunk.data)
            if size > _MAX_ADAPTER_BYTES:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an adapter may have at most 4 GiB")
            files.setdefault(chunk.name, bytearray()).extend(chunk.data)
        try:
            return await asyncio.to_thread(self._read, {name: bytes(data) for name, data in files.items()})
        except TemperError as error:
            return adapters_pb2.ValidateResponse(error=to_message(error))

    def _read(self, files: Mapping[str, bytes]) -> adapters_pb2.ValidateResponse:
        """Size of an adapter or a drafter. Raises AdapterRejected."""
        if kind_of(files) == "drafter":
            tensors = self._serving.read_drafter(files)
            return adapters_pb2.ValidateResponse(parameters=sum(tensor.numel() for tensor in tensors.values()))
        bound = self._serving.bind(files)
        return adapters_pb2.ValidateResponse(
            rank=bound.rank, parameters=sum(t.a.numel() + t.b.numel() for t in bound.targets.values())
        )


def make_server(
    serving: Serving,
    health: health_pb2_grpc.HealthServicer,
    max_message_bytes: int,
    tracer: Tracer = NO_TRACER,
) -> aio.Server:
    """gRPC server with all services, not bound yet."""
    server = aio.server(
        interceptors=[CallTraces(tracer)] if tracer.on else None,
        options=[
            # A taken port must be an error, not a second listener that gets half of the connections.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    engine_pb2_grpc.add_EngineServicer_to_server(EngineService(serving), server)
    adapters_pb2_grpc.add_AdaptersServicer_to_server(AdaptersService(serving), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server
