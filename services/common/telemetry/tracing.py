"""Traces: spans of requests and jobs, sent to an OpenTelemetry collector (OTLP over gRPC).

The only module that knows OpenTelemetry, and it imports its SDK only when TEMPER_OTLP_ENDPOINT names a collector. All
others have a ``Tracer`` and pass contexts on as W3C ``traceparent`` texts (https://www.w3.org/TR/trace-context/), which
are also what travels in HTTP headers, in gRPC metadata, in the frames of the engines' streams and in jobs. Without a
collector every span is one object that does nothing. A collector that is away or slow costs spans, never a request:
they wait in a bounded queue for a thread of the SDK's.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

import structlog

from services.common.security.outbound import authorities, proxy_for
from services.common.settings import CommonSettings
from services.common.telemetry.process import installed_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext

Value: TypeAlias = "str | bool | int | float | Sequence[str]"
Attributes: TypeAlias = Mapping[str, Value]
Kind: TypeAlias = Literal["server", "client", "internal", "consumer"]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_CLOSE_SECONDS = 3.0
"""At the end of a process, for the spans that still wait."""
_QUEUE = 8192
"""Spans that wait to be sent; more are dropped."""
_DELAY_MS = 1000.0
"""Between two exports."""
_EXPORT_SECONDS = 5.0

log = structlog.get_logger(__name__)
_current: ContextVar[str] = ContextVar("traceparent", default="")


def checked(traceparent: str) -> str:
    """The text if it is a W3C trace context, else ""."""
    return traceparent if _TRACEPARENT.fullmatch(traceparent) else ""


def sampled(traceparent: str) -> bool:
    """True if whoever began the trace keeps it. The text is a checked one."""
    return bool(traceparent) and bool(int(traceparent[53:55], 16) & 1)


def trace_id(traceparent: str) -> str:
    """32 hexadecimal digits; the text is a checked one."""
    return traceparent[3:35]


def exemplar(traceparent: str) -> dict[str, str] | None:
    """Labels that a histogram keeps beside a measured value, so that a graph leads to a trace; None if there is
    none."""
    return {"trace_id": trace_id(traceparent)} if sampled(traceparent) else None


def current() -> str:
    """The context of what runs here now, for calls to others; empty outside of a span."""
    return _current.get()


class Span(Protocol):
    """Something that takes time. As a context manager it is what runs now, names itself in the logs of its block, and
    ends with it."""

    @property
    def traceparent(self) -> str:
        """The context for what it causes; "" where nothing is traced."""
        ...

    @property
    def recorded(self) -> bool:
        """True if anybody will see the span: attributes that are dear to compute are not needed otherwise."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        ...

    def rename(self, name: str) -> None:
        """Changes the span's name."""
        ...

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something that happened within it, now."""
        ...

    def fail(self, kind: str, message: str = "") -> None:
        """Marks the span as failed; ``kind`` becomes error.type."""
        ...

    def end(self, at: float | None = None) -> None:
        """Ends the span: now, or at a time in Unix seconds. Called once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Makes spans."""

    @property
    def on(self) -> bool:
        """True if spans are exported."""
        ...

    def start(
        self,
        name: str,
        *,
        parent: str = "",
        state: str = "",
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        at: float | None = None,
    ) -> Span:
        """A span that has begun.

        Args:
            parent: traceparent of what caused it; empty: it begins a trace.
            state: W3C tracestate that came with the parent.
            links: traceparents of what it has to do with, in other traces.
            at: Unix seconds; None: now.
        """
        ...

    def close(self) -> None:
        """Sends what still waits, for a few seconds at most."""
        ...


class _NoSpan:
    traceparent = ""
    recorded = False

    def set(self, attributes: Attributes) -> None:
        """Ignores it."""

    def rename(self, name: str) -> None:
        """Ignores it."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Ignores it."""

    def fail(self, kind: str, message: str = "") -> None:
        """Ignores it."""

    def end(self, at: float | None = None) -> None:
        """Ignores it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ignores it."""


class _NoTracer:
    on = False

    def start(
        self,
        name: str,  # noqa: ARG002 - the protocol's signature
        *,
        parent: str = "",  # noqa: ARG002
        state: str = "",  # noqa: ARG002
        kind: Kind = "internal",  # noqa: ARG002
        attributes: Attributes | None = None,  # noqa: ARG002
        links: Sequence[str] = (),  # noqa: ARG002
        at: float | None = None,  # noqa: ARG002
    ) -> Span:
        return NO_SPAN

    def close(self) -> None:
        """There is nothing to send."""


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def open_tracer(settings: CommonSettings, service: str) -> Tracer:
    """The tracer of a process; one that does nothing if no collector is named.

    Args:
        service: service.name, "temper-" + this.
    """
    if not settings.otlp_endpoint:
        return NO_TRACER
    from grpc import ssl_channel_credentials
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    resource = Resource.create(
        {
            "service.name": f"temper-{service}",
            "service.version": installed_version(),
            "service.instance.id": socket.gethostname(),
        }
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBasedTraceIdRatio(settings.trace_ratio), shutdown_on_exit=False
    )
    headers = settings.otlp_headers.get_secret_value()
    insecure = settings.otlp_endpoint.startswith("http://")
    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=insecure,
        credentials=None if insecure else ssl_channel_credentials(authorities(settings)),
        headers=headers or None,
        timeout=_EXPORT_SECONDS,
        channel_options=_way_out(settings),
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE,
            schedule_delay_millis=_DELAY_MS,
            export_timeout_millis=_EXPORT_SECONDS * 1000,
        )
    )
    log.info("traces go to a collector", endpoint=settings.otlp_endpoint, ratio=settings.trace_ratio)
    return _Tracer(provider)


def _way_out(settings: CommonSettings) -> Any:
    """Options of the collector's channel: the proxy, as for all that leaves the process. gRPC by itself reads other
    variables than they do, by other rules. (The exporter's annotation has one option, of text.)"""
    proxy = proxy_for(settings, settings.otlp_endpoint)
    return (("grpc.enable_http_proxy", 0),) if proxy is None else (("grpc.http_proxy", proxy),)


class _Tracer:
    on = True

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace

        self._provider = provider
        self._tracer = provider.get_tracer("temper", installed_version())
        self._kinds = {
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
            "internal": trace.SpanKind.INTERNAL,
            "consumer": trace.SpanKind.CONSUMER,
        }

    def start(
        self,
        name: str,
        *,
        parent: str = "",
        state: str = "",
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        at: float | None = None,
    ) -> Span:
        from opentelemetry import trace
        from opentelemetry.context import Context

        # Never the SDK's own idea of what runs now: contexts are passed on as texts.
        context = Context()
        if parent:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_remote(parent, state)), context)
        span = self._tracer.start_span(
            name,
            context=context,
            kind=self._kinds[kind],
            attributes=attributes,
            links=[trace.Link(_remote(link, "")) for link in links],
            start_time=None if at is None else _nanoseconds(at),
        )
        return _Span(span)

    def close(self) -> None:
        # In a thread that may be left behind: the SDK tries each batch for as long as an export may take, and a
        # collector that is away must not hold up the end of the process.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def _remote(traceparent: str, state: str) -> SpanContext:
    from opentelemetry import trace

    return trace.SpanContext(
        int(traceparent[3:35], 16),
        int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(traceparent[53:55], 16)),
        trace_state=trace.TraceState.from_header([state]) if state else None,
    )


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)


class _Span:
    """A span of the SDK's."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self.recorded = span.is_recording()
        self._open: AbstractContextManager[None] = nullcontext()

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, attributes)

    def fail(self, kind: str, message: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message or None))

    def end(self, at: float | None = None) -> None:
        self._span.end(None if at is None else _nanoseconds(at))

    def __enter__(self) -> Self:
        self._open = running(self.traceparent)
        self._open.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(type(error).__name__, str(error))
        self._open.__exit__(kind, error, trace)
        self.end()


@contextmanager
def running(traceparent: str) -> Iterator[None]:
    """Inside, ``current`` is this context, and lines of the log have its ids. Nothing for ""."""
    if not traceparent:
        yield
        return
    token = _current.set(traceparent)
    with structlog.contextvars.bound_contextvars(**log_fields(traceparent)):
        try:
            yield
        finally:
            _current.reset(token)


def log_fields(traceparent: str) -> dict[str, str]:
    """Fields of a log line about this context."""
    return {"trace_id": traceparent[3:35], "span_id": traceparent[36:52]} if traceparent else {}


class LoopTime:
    """Turns a monotonic clock's times into Unix seconds, as they were at one moment."""

    def __init__(self, now: float) -> None:
        self._offset = time.time() - now

    def unix(self, at: float) -> float:
        return at + self._offset
