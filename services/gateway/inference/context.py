"""Inference context: what turning a request into tokens needs of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.security.api_keys import ANONYMOUS
from services.common.telemetry.tracing import NO_TRACER, Tracer
from services.gateway.auth.caller import owner, seconds_left
from services.gateway.core.admission import Admission
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.canaries import Canaries
from services.gateway.inference.recorder import RequestRecorder
from services.gateway.protocol.fields.sampling import SamplingFields
from services.gateway.settings import GatewaySettings
from services.learning.canaries.enrolment import Enrolment


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """Resources of inference, built once by the application's lifespan.

    Args:
        settings: everything that can be set.
        engines: the engines that answer.
        metrics: all series.
        admission: places for choices in flight.
        tracer: gets spans of completions.
        recorder: logs requests; None: the request log is off.
        canaries: those that run; None: none ever do.
    """

    settings: GatewaySettings
    engines: EnginePool
    metrics: GatewayMetrics
    admission: Admission
    tracer: Tracer = NO_TRACER
    recorder: RequestRecorder | None = None
    canaries: Canaries | None = None

    async def engine_started(self) -> None:
        """Waits for an engine while there is none, if the settings say that one may be started for a request."""
        if self.settings.engine_start_seconds and not self.engines.ready:
            longest = min(self.settings.engine_start_seconds, self.settings.request_timeout_seconds)
            await self.engines.started(seconds_left(longest))

    def enrol(self, body: SamplingFields, session: str | None) -> Enrolment | None:
        """Part of a request in a canary; None: it has none."""
        return None if self.canaries is None else self.canaries.enrol(body, session)

    def count_tokens(self, kind: str, tokens: int) -> None:
        """Counts tokens of the caller that this task works for.

        Args:
            kind: "prompt", "cached" or "completion".
        """
        self.metrics.tokens.labels(kind).inc(tokens)
        if self.settings.metrics_by_key:
            self.metrics.key_tokens.labels(owner() or ANONYMOUS, kind).inc(tokens)
