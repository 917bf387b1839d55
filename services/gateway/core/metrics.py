"""Prometheus metrics of one gateway: its own series, and OpenTelemetry's for generative AI.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ has names, attributes and buckets of the latter."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from services.common.telemetry import tracing
from services.common.telemetry.process import export_process
from services.gateway.core.engine_series import EngineSeries
from services.gateway.core.learner_metrics import LearnerMetrics


class LoopHistogram(Collector):
    """Exported like the library's own, without its locks and its search from the first bucket on: that took a tenth of
    what a streamed token costs here. Observed on one thread only; a scrape on another may miss the last observation.

    Args:
        name: of the series.
        documentation: for `# HELP`.
        labels: names of its labels.
        buckets: upper bounds, ascending, without infinity.
        registry: that exports it.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self.label_names = tuple(labels)
        self.bounds = tuple(buckets)
        self._series: dict[tuple[str, ...], LoopSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> LoopSeries:
        """The series of these values of its labels; keep it where it is observed often."""
        if (found := self._series.get(values)) is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self._name} has the labels {self.label_names}, not {len(values)}")
            found = self._series[values] = LoopSeries(self.bounds)
        return found

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Collects the samples for the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self.label_names)
        for values, series in tuple(self._series.items()):
            family.add_metric(values, series.buckets(), series.sum)
        yield family


class LoopSeries:
    """One series of a LoopHistogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._traced: list[tuple[float, str, float] | None] = [None] * len(self._counts)
        """Exemplars: for each bucket the newest value of a trace that is kept, that trace's context, and when it
        was."""
        self.sum = 0.0

    def observe(self, value: float, traceparent: str = "") -> None:
        """Counts a value; one that equals a bound is in the bucket of that bound. Its trace becomes the exemplar."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if tracing.sampled(traceparent):
            self._traced[bucket] = (value, traceparent, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Counts up to each bound, as the library takes them."""
        found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        for bound, count, traced in zip(bounds, itertools.accumulate(self._counts), self._traced, strict=True):
            if traced is None:
                found.append((bound, float(count)))
            else:
                value, traceparent, when = traced
                labels = {"trace_id": tracing.trace_id(traceparent)}
                found.append((bound, float(count), Exemplar(labels, value, when)))
        return found


_ATTRIBUTES = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_PROVIDER = "temper"
_REQUEST_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**power for power in range(14))


class GenAiMetrics:
    """The histograms of one gateway.

    Args:
        registry: that exports them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request to its last token, by error_type (empty: none).",
            (*_ATTRIBUTES, "error_type"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request to the first token of each of its completions.",
            _ATTRIBUTES,
            buckets=_FIRST_SECONDS,
            registry=registry,
        )
        self.output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Between two tokens behind the first, the mean of a completion.",
            _ATTRIBUTES,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.usage = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request, by gen_ai_token_type: input or output.",
            (*_ATTRIBUTES, "gen_ai_token_type"),
            buckets=_TOKENS,
            registry=registry,
        )


class GenAiRequest:
    """Measurements of one request, from now on.

    Args:
        metrics: where.
        operation: "chat" or "text_completion".
        model: the served model; names that clients make up are no labels.
    """

    def __init__(self, metrics: GenAiMetrics, operation: str, model: str) -> None:
        self._metrics = metrics
        self._labels = (operation, _PROVIDER, model)
        self._started = time.monotonic()
        self._first: dict[int, float] = {}

    def begun(self, completion: int) -> None:
        """A completion has its first token."""
        now = self._first[completion] = time.monotonic()
        self._metrics.first_token.labels(*self._labels).observe(now - self._started)

    def finished(self, completion: int, tokens: int) -> None:
        """A completion has its last token."""
        first = self._first.get(completion)
        if first is not None and tokens > 1:
            self._metrics.output_token.labels(*self._labels).observe((time.monotonic() - first) / (tokens - 1))

    def ended(self, *, input_tokens: int, output_tokens: int) -> None:
        """All completions have ended."""
        self._ended("")
        self._metrics.usage.labels(*self._labels, "input").observe(input_tokens)
        self._metrics.usage.labels(*self._labels, "output").observe(output_tokens)

    def failed(self, code: str) -> None:
        """The request ended with an error of this code."""
        self._ended(code)

    def _ended(self, error: str) -> None:
        self._metrics.duration.labels(*self._labels, error).observe(time.monotonic() - self._started)


_FAST = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


_LATENCY_LABELS = ("model", "stream")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Histograms of latency in which one request's completions are observed."""

    ttft: Histogram
    itl: LoopSeries
    e2e: Histogram


class GatewayMetrics:
    """All series, in a registry of their own so that two gateways in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        export_process(self.registry, service="gateway")
        self.genai = GenAiMetrics(self.registry)
        self.requests = Counter(
            "temper_gateway_requests",
            "HTTP requests by route and status; route is unmatched where the path is that of no route.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.duration = Histogram(
            "temper_gateway_request_duration_seconds",
            "From the first byte of a request to the last of its response.",
            ("route",),
            buckets=_SLOW,
            registry=self.registry,
        )
        self.ttft = Histogram(
            "temper_gateway_time_to_first_token_seconds",
            "From the request to its first token, by served model and whether it streams.",
            _LATENCY_LABELS,
            buckets=_SLOW,
            registry=self.registry,
        )
        self.itl = LoopHistogram(
            "temper_gateway_inter_token_latency_seconds",
            "Between two updates of a completion, divided by their tokens.",
            _LATENCY_LABELS,
            buckets=_FAST,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "temper_gateway_completion_duration_seconds",
            "From the request to its last token.",
            _LATENCY_LABELS,
            buckets=_SLOW,
            registry=self.registry,
        )
        self.tokens = Counter(
            "temper_gateway_tokens", "Tokens by kind: prompt, cached or completion.", ("kind",), registry=self.registry
        )
        self.key_tokens = Counter(
            "temper_gateway_key_tokens",
            "Tokens by API key (its id) and kind: prompt, cached or completion; with TEMPER_METRICS_BY_KEY.",
            ("key", "kind"),
            registry=self.registry,
        )
        self.finished = Counter(
            "temper_gateway_completions", "Completions by finish reason.", ("reason",), registry=self.registry
        )
        self.logged_requests = Counter(
            "temper_gateway_logged_requests", "Requests written to the request log's spool.", registry=self.registry
        )
        self.dropped_log_requests = Counter(
            "temper_gateway_dropped_log_requests",
            "Requests that the request log left out, by reason: queue, spool, disk or error.",
            ("reason",),
            registry=self.registry,
        )
        self.feedback = Counter(
            "temper_gateway_feedback", "Opinions of answers, by source.", ("source",), registry=self.registry
        )
        self.canaries = Gauge(
            "temper_gateway_canaries", "Canaries that run; every gateway says the same.", registry=self.registry
        )
        self.canary_look_age = Gauge(
            "temper_gateway_canary_look_age_seconds",
            "Since the controller looked at the canary that it has looked at least recently; 0 if none runs.",
            registry=self.registry,
        )
        self.canary_answers = Counter(
            "temper_gateway_canary_answers",
            "Answers in canaries, by adapter, arm (current, candidate) and outcome: a finish reason, or error.",
            ("adapter", "arm", "outcome"),
            registry=self.registry,
        )
        self.canaries_ended = Counter(
            "temper_gateway_canaries_ended",
            "Canaries whose end this gateway saw to, by state (promoted, rolled_back, superseded) and reason.",
            ("state", "reason"),
            registry=self.registry,
        )
        self.canaries_ended.labels("rolled_back", "guardrail")  # so that the first one is an increase
        self.learners = LearnerMetrics(self.registry)
        self.engine = EngineSeries(self.registry)
        self.webhook_deliveries = Counter(
            "temper_gateway_webhook_deliveries",
            "Attempts to deliver an event to a webhook, by outcome: delivered, retried or failed, which is given up.",
            ("outcome",),
            registry=self.registry,
        )
        self.webhook_deliveries.labels("failed")  # so that the first one is an increase
        self.batches = Counter(
            "temper_gateway_batches", "Batches that this gateway ran, by outcome.", ("outcome",), registry=self.registry
        )
        self.batches_running = Gauge("temper_gateway_batches_running", "Batches that run here.", registry=self.registry)
        self.batch_requests = Counter(
            "temper_gateway_batch_requests",
            "Requests of batches that were answered, by status.",
            ("status",),
            registry=self.registry,
        )
        self.in_flight = Gauge("temper_gateway_in_flight", "Completions in the gateway.", registry=self.registry)
        self.background = Gauge(
            "temper_gateway_background_responses", "Background responses in the gateway.", registry=self.registry
        )
        self.engines = Gauge(
            "temper_gateway_engines", "Engines by state: ready or away.", ("state",), registry=self.registry
        )
        self.waiting_for_engine = Gauge(
            "temper_gateway_waiting_for_engine",
            "Requests that wait here until an engine has started (TEMPER_ENGINE_START_SECONDS).",
            registry=self.registry,
        )
        self.ready = Gauge(
            "temper_gateway_ready",
            "1: completions can be served, an engine is ready and the gateway does not stop.",
            registry=self.registry,
        )
        self.draining = Gauge(
            "temper_gateway_draining", "1: the gateway stops, what runs finishes.", registry=self.registry
        )
        self.redis_up = Gauge(
            "temper_gateway_redis_up", "1: Redis answered when its queues were last looked at.", registry=self.registry
        )
        self.jobs = Gauge(
            "temper_gateway_jobs",
            "Jobs in Redis by queue (training, batches) and state (queued, running); every gateway says the same.",
            ("queue", "state"),
            registry=self.registry,
        )
        self.oldest_queued = Gauge(
            "temper_gateway_job_oldest_queued_seconds",
            "Since the oldest queued job was submitted; 0 if none is queued.",
            ("queue",),
            registry=self.registry,
        )
        self.dead_letters = Gauge(
            "temper_gateway_dead_letters",
            "What a queue gave up on and keeps with the reason, the last thousand.",
            ("queue",),
            registry=self.registry,
        )
        self.auth_refusals = Counter(
            "temper_gateway_auth_refusals",
            "Requests refused for their API key, by reason: missing, invalid, expired, revoked or scope.",
            ("reason",),
            registry=self.registry,
        )
        self.rate_limited = Counter(
            "temper_gateway_rate_limited",
            "Requests refused for a limit of their API key: requests, tokens or concurrency.",
            ("limit",),
            registry=self.registry,
        )
        self.quota_fallbacks = Counter(
            "temper_gateway_quota_fallbacks",
            "Times that this gateway began to count limits alone, because Redis did not answer.",
            registry=self.registry,
        )
        self.quota_shared = Gauge(
            "temper_gateway_quota_shared", "1: limits are counted in Redis; 0: here alone.", registry=self.registry
        )
        self.quota_shared.set(1)
        self.api_keys = Gauge("temper_gateway_api_keys", "API keys that are valid now.", registry=self.registry)
        self.api_key_reload_failures = Counter(
            "temper_gateway_api_key_reload_failures",
            "New contents of the key file that could not be used; the keys from before stay valid.",
            registry=self.registry,
        )
        self.audit_failures = Counter(
            "temper_gateway_audit_failures", "Lines that could not be written to the audit log.", registry=self.registry
        )
        self.breaker = Gauge(
            "temper_gateway_engine_breaker",
            "Circuit breaker of an engine, by its name: 0 closed, 1 half open, 2 open.",
            ("engine",),
            registry=self.registry,
        )
        self.load = Gauge(
            "temper_gateway_engine_load",
            "Requests at an engine, and prompt tokens that wait there, in requests.",
            ("engine",),
            registry=self.registry,
        )
        self.routed = Counter(
            "temper_gateway_routed",
            "Requests sent to engines by what decided: session, choices, adapter, prefix, hash, or only one engine.",
            ("by",),
            registry=self.registry,
        )
        self.retries = Counter(
            "temper_gateway_retries",
            "Requests sent again before their first token: the engine refused or was lost.",
            ("reason",),
            registry=self.registry,
        )

    def latencies(self, model: str, *, stream: bool) -> Latencies:
        """Latencies of a request to this served model."""
        labels = (model, "true" if stream else "false")
        return Latencies(self.ttft.labels(*labels), self.itl.labels(*labels), self.e2e.labels(*labels))
