"""Prometheus metrics of one gateway."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.telemetry.process import export_process
from services.gateway.core.genai_metrics import GenAiMetrics
from services.gateway.core.histogram import LoopHistogram, LoopSeries

_FAST = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


_LATENCY_LABELS = ("model", "stream")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Where the times of one request's completions are observed."""

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
            "Requests sent to engines by what decided: session, adapter, prefix, hash, or only one engine.",
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
