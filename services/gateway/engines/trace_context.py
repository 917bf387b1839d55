"""Says in the metadata of single gRPC calls which span makes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from services.common.telemetry import tracing


def _traced(details: aio.ClientCallDetails) -> aio.ClientCallDetails:
    traceparent = tracing.current()
    if not traceparent:
        return details
    metadata = aio.Metadata(*(details.metadata or ()), ("traceparent", traceparent))
    return aio.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)


class UnaryContext(aio.UnaryUnaryClientInterceptor):
    """Of calls with one message each way."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request)


class UploadContext(aio.StreamUnaryClientInterceptor):
    """Of calls that send several messages."""

    async def intercept_stream_unary(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request_iterator)
