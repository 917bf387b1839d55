"""A collector of traces for tests: OTLP over real gRPC, kept in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it arrived."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    """Empty: it began its trace."""
    kind: int
    begins: int
    ends: int
    """Nanoseconds of Unix time."""
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace and span of each."""
    failed: bool
    events: tuple[str, ...]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of this machine; a context manager.

    Args:
        credentials: of a server with TLS; None: plaintext.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.spans: list[Received] = []
        self.metadata: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            self.endpoint = f"https://127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', credentials)}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        """Of the protocol."""
        with self._lock:
            self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_received(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str, *, trace: str | None = None) -> list[Received]:
        with self._lock:
            return [span for span in self.spans if span.name == name and trace in (None, span.trace)]

    def of(self, trace: str) -> list[Received]:
        """All spans of a trace."""
        with self._lock:
            return [span for span in self.spans if span.trace == trace]

    def wait_for(self, name: str, *, count: int = 1, seconds: float = 30.0) -> list[Received]:
        """The spans of this name, once there are so many: they are sent every few seconds."""
        deadline = time.monotonic() + seconds
        while len(found := self.named(name)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} spans {name!r} of {count}; there are {tree(self.spans)}")
            time.sleep(0.1)
        return found


def tree(spans: Sequence[Received]) -> str:
    """The spans as an indented text, in the order in which they began."""
    known = {span.id for span in spans}
    lines: list[str] = []

    def write(span: Received, depth: int) -> None:
        milliseconds = (span.ends - span.begins) / 1e6
        links = f"  -> {', '.join(link for link, _ in span.links)}" if span.links else ""
        lines.append(f"{'  ' * depth}{span.name}  [{span.service}] {milliseconds:.1f} ms{links}")
        for child in sorted(spans, key=lambda one: one.begins):
            if child.parent == span.id:
                write(child, depth + 1)

    for span in sorted(spans, key=lambda one: one.begins):
        if span.parent not in known:
            write(span, 0)
    return "\n".join(lines)


def _received(service: str, span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        span.status.code == 2,
        tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
