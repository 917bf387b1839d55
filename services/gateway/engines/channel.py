"""gRPC channels to engines, and what their errors mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpc import aio

from services.common.security.tls import Certificates
from services.common.telemetry import tracing

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    # Engines are inside; HTTPS_PROXY is for what is not, and gRPC would take it for every channel.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_NOT_CONNECTED = "failed to connect to all addresses"
_TLS: Mapping[str, str] = {
    "unable to get local issuer certificate": "the engine's certificate is not of the CA in TEMPER_GRPC_TLS_CA",
    "self signed certificate": "the engine's certificate is not of the CA in TEMPER_GRPC_TLS_CA",
    "self-signed certificate": "the engine's certificate is not of the CA in TEMPER_GRPC_TLS_CA",
    "certificate has expired": "the engine's certificate has expired",
    "certificate is not yet valid": "the engine's certificate is not valid yet",
    "Hostname Verification": "the engine's certificate is for another name: set TEMPER_GRPC_TLS_SERVER_NAME to one of "
    "its DNS names",
    "unsuitable certificate purpose": "the engine's certificate is not one of a TLS server",
    "WRONG_VERSION_NUMBER": "the engine does not speak TLS: set TEMPER_GRPC_TLS_CERT, _KEY and _CA there, too",
    "Socket closed": "the engine closed the connection in the handshake: it refuses the certificate of this gateway "
    "(expired, or not of the CA in the engine's TEMPER_GRPC_TLS_CA; the engine's log has the reason)",
}
_PLAIN: Mapping[str, str] = {
    "Socket closed": "the engine closes connections without TLS: set TEMPER_GRPC_TLS_CERT, _KEY and _CA here if they "
    "are set there",
}


class Channels:
    """Opens channels.

    Args:
        certificates: of this gateway; None: plaintext.
        server_name: the name in the engines' certificates; empty: the host that is dialled.
        traced: single calls say which span makes them.
    """

    def __init__(
        self, certificates: Certificates | None = None, server_name: str = "", *, traced: bool = False
    ) -> None:
        self._interceptors = [_UnaryTracing(), _UploadTracing()] if traced else None
        self.certificates = certificates
        self._server_name = server_name

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what a channel that is opened now would present; empty without TLS."""
        return "" if self.certificates is None else self.certificates.current.fingerprint

    def open(self, address: str) -> aio.Channel:
        """A channel to host:port, which connects when it is used."""
        if self.certificates is None:
            return aio.insecure_channel(address, options=_OPTIONS, interceptors=self._interceptors)
        options = _OPTIONS
        if self._server_name:
            options += (("grpc.ssl_target_name_override", self._server_name),)
        credentials = self.certificates.channel_credentials()
        return aio.secure_channel(address, credentials, options=options, interceptors=self._interceptors)

    def explain(self, error: aio.AioRpcError) -> str:
        """Explanation of a failed call, for logs and /healthz."""
        details = error.details() or ""
        if _NOT_CONNECTED in details:
            known = _PLAIN if self.certificates is None else _TLS
            meaning = next((meaning for text, meaning in known.items() if text in details), None)
            if meaning is not None:
                return f"{'TLS: ' if self.certificates else ''}{meaning}"
        return f"{error.code().name}: {details}"

    def describe(self, group: BaseExceptionGroup[BaseException]) -> str:
        """The first of the errors that ended a connection, for logs and /healthz."""
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        return self.explain(first) if isinstance(first, aio.AioRpcError) else str(first)


def _traced(details: aio.ClientCallDetails) -> aio.ClientCallDetails:
    traceparent = tracing.current()
    if not traceparent:
        return details
    metadata = aio.Metadata(*(details.metadata or ()), ("traceparent", traceparent))
    return aio.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)


class _UnaryTracing(aio.UnaryUnaryClientInterceptor):
    """Interceptor that adds the current span to calls with one message each way."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request)


class _UploadTracing(aio.StreamUnaryClientInterceptor):
    """Interceptor that adds the current span to calls that send several messages."""

    async def intercept_stream_unary(
        self,
        continuation: Callable[[aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return await continuation(_traced(client_call_details), request_iterator)
