"""Spans of requests, made when a request has ended, from times that the loop records anyway, on a thread of their own.

While a request runs nothing is done for its trace. At its end the loop's thread puts one event into a queue, only for
requests that are traced.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import Empty, Full, Queue

from services.common.telemetry.tracing import LoopTime, Span, Tracer, sampled
from services.engine.observability.events import EngineEvent, RequestDone
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason

_WAITING = 4096
"""Most ended requests whose spans are not made yet; further ones are not traced."""
_POLL_SECONDS = 0.5


class RequestTraces:
    """Makes the spans of traced requests."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._ended: Queue[RequestDone] = Queue(_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def listen(self, event: EngineEvent) -> None:
        """Queues a request that has ended, if it is traced."""
        if isinstance(event, RequestDone) and sampled(event.finished.request.traceparent):
            with suppress(Full):  # rather lose a trace than delay a step
                self._ended.put_nowait(event)

    def close(self) -> None:
        """Makes the waiting spans; the tracer sends them when it is closed."""
        self._closed.set()
        self._thread.join(_POLL_SECONDS * 4)

    def _run(self) -> None:
        while True:
            try:
                event = self._ended.get(timeout=_POLL_SECONDS)
            except Empty:
                if self._closed.is_set():
                    return
                continue
            self._trace(event.finished, event.submitted_at, event.now)

    def _trace(self, finished: Finished, submitted_at: float, now: float) -> None:
        unix = LoopTime(time.monotonic()).unix
        request = finished.request
        span = self._tracer.start(
            "generate",
            parent=request.traceparent,
            kind="server",
            at=unix(submitted_at),
            attributes={
                "gen_ai.response.id": request.request_id,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "gen_ai.usage.output_tokens": len(finished.output_ids),
                "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
                "gen_ai.response.finish_reasons": [finished.finish_reason.value],
                "temper.adapter": request.pin.version,
                "temper.preemptions": finished.preemptions,
                "temper.priority": request.priority,
            },
        )
        if finished.finish_reason is FinishReason.ERROR:
            span.fail("engine")
        scheduled, first = finished.scheduled_at, finished.first_token_at
        self._child(span, "queue", unix(submitted_at), unix(now if scheduled is None else scheduled))
        if scheduled is not None:
            self._child(span, "prefill", unix(scheduled), unix(now if first is None else first))
        if first is not None:
            self._child(span, "decode", unix(first), unix(now))
        span.end(unix(now))

    def _child(self, parent: Span, name: str, begins: float, ends: float) -> None:
        self._tracer.start(name, parent=parent.traceparent, at=begins).end(ends)
