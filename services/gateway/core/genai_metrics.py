"""OpenTelemetry's metrics for generative AI, under the names that they have in Prometheus.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ has names, attributes and buckets.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram

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
    """What is measured of one request, from now on.

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
