"""Spans of single gRPC calls, such as Sync, Validate and those of sessions, if the caller traces them.

The stream of a gateway carries the contexts of its requests in its frames
(services/engine/observability/request_traces.py); frequent calls, health and status, have no span.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from services.common.telemetry import tracing
from services.common.telemetry.tracing import Tracer

_KEY = "traceparent"


class CallTraces(aio.ServerInterceptor):
    """Makes a span of every call that brings a traceparent in its metadata.

    Names and attributes: https://opentelemetry.io/docs/specs/semconv/rpc/rpc-spans/.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        parent = tracing.checked(str(metadata.get(_KEY, "")))
        if handler is None or not parent:
            return handler
        method = handler_call_details.method.lstrip("/")

        def started() -> tracing.Span:
            service, _, name = method.rpartition("/")
            attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
            return self._tracer.start(method, parent=parent, kind="server", attributes=attributes)

        async def answered(call: Any, context: Any) -> Any:
            with started():
                return await behaviour(call, context)

        async def streamed(call: Any, context: Any) -> AsyncIterator[Any]:
            with started():
                async for part in behaviour(call, context):
                    yield part

        shapes: tuple[tuple[Any, Any, Any], ...] = (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler, answered),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler, answered),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler, streamed),
        )
        for behaviour, make, wrapped in shapes:
            if behaviour is not None:
                traced: grpc.RpcMethodHandler[Any, Any] = make(
                    wrapped,
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return traced
        return handler
