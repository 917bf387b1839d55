"""Prometheus metrics of one engine. The four vllm: gauges are what inference gateways and autoscalers route by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.engine.adapter_ports import AdapterSnapshot
from services.engine.ports import LoopStatus, StepStats
from services.engine.updates import Finished

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


_MASKS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class EngineMetrics:
    """Implements services.engine.ports.EngineObserver: counts where it is called, without I/O."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._steps = Counter("temper_engine_steps", "Steps run.", registry=registry)
        self._failed = Counter("temper_engine_failed_steps", "Steps that failed.", registry=registry)
        self._step = Histogram(
            "temper_engine_step_seconds",
            "Duration of a step, with the training slice before it.",
            registry=registry,
            buckets=_LATENCY,
        )
        self._compute = Histogram(
            "temper_engine_compute_seconds", "Model and sampling of a step.", registry=registry, buckets=_LATENCY
        )
        tokens = Counter("temper_engine_tokens", "Tokens computed.", ["kind"], registry=registry)
        self._decoded = tokens.labels("decode")
        self._prefilled = tokens.labels("prefill")
        cached = Counter("temper_engine_cached_tokens", "Prompt tokens from the prefix cache.", registry=registry)
        self._cached = cached
        self._requests = Counter("temper_engine_requests", "Requests ended.", ["finish_reason"], registry=registry)
        self._preemptions = Counter(
            "temper_engine_preemptions", "Sequences that lost their blocks and were recomputed.", registry=registry
        )
        self._queue = Histogram(
            "temper_engine_queue_seconds", "Submission to first step.", registry=registry, buckets=_LATENCY
        )
        self._first = Histogram(
            "temper_engine_time_to_first_token_seconds",
            "Submission to first token.",
            registry=registry,
            buckets=_LATENCY,
        )
        self._each = Histogram(
            "temper_engine_time_per_output_token_seconds",
            "Mean time per output token after the first, a request.",
            registry=registry,
            buckets=_LATENCY,
        )

        self._masks = Histogram(
            "temper_engine_mask_seconds",
            "Making the masks of a step with constrained rows.",
            registry=registry,
            buckets=_MASKS,
        )
        self._grammars = Counter(
            "temper_engine_grammars",
            "Grammars of requests: cached, compiled, refused, overloaded.",
            ["result"],
            registry=registry,
        )
        self._compiling = Histogram(
            "temper_engine_grammar_compile_seconds",
            "Compiling a grammar that was not cached, with the wait for its turn.",
            registry=registry,
            buckets=_LATENCY,
        )

    def grammar_done(self, result: str, seconds: float) -> None:
        self._grammars.labels(result).inc()
        if result == "compiled":
            self._compiling.observe(seconds)

    def step_done(self, stats: StepStats) -> None:
        self._steps.inc()
        self._step.observe(stats.seconds)
        self._compute.observe(stats.compute_seconds)
        self._decoded.inc(stats.decodes)
        self._prefilled.inc(stats.prefill_tokens)
        if stats.mask_seconds:
            self._masks.observe(stats.mask_seconds)

    def step_failed(self, error: Exception) -> None:  # noqa: ARG002 - the protocol's signature
        self._failed.inc()

    def request_done(self, finished: Finished, submitted_at: float, now: float) -> None:
        self._requests.labels(finished.finish_reason.value).inc()
        self._cached.inc(finished.cached_tokens)
        self._preemptions.inc(finished.preemptions)
        if finished.scheduled_at is not None:
            self._queue.observe(finished.scheduled_at - submitted_at)
        if finished.first_token_at is not None:
            self._first.observe(finished.first_token_at - submitted_at)
            if len(finished.output_ids) > 1:
                self._each.observe((now - finished.first_token_at) / (len(finished.output_ids) - 1))


class StateCollector(Collector):
    """Gauges read when somebody asks: nothing to keep current on the loop thread."""

    def __init__(
        self,
        model_name: str,
        status: Callable[[], LoopStatus],
        adapters: Callable[[], AdapterSnapshot],
        training: Callable[[], bool],
        max_loras: int,
    ) -> None:
        self._model_name = model_name
        self._status = status
        self._adapters = adapters
        self._training = training
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        counts = status.counts
        waiting = counts.waiting + status.waiting_for_adapters
        used_share = counts.blocks_used / max(counts.blocks_total, 1)
        gauges: dict[str, tuple[str, float]] = {
            "temper_engine_running": ("Sequences that run.", counts.running),
            "temper_engine_waiting": ("Requests that wait.", waiting),
            "temper_engine_blocks_used": ("KV blocks of live sequences.", counts.blocks_used),
            "temper_engine_blocks_cached": ("KV blocks of the prefix cache alone.", counts.blocks_cached),
            "temper_engine_blocks_total": ("KV blocks.", counts.blocks_total),
            "temper_engine_slots_used": ("State slots of live sequences.", counts.slots_used),
            "temper_engine_slots_total": ("State slots.", counts.slots_total),
            "temper_engine_ready": ("1: new requests are accepted.", float(status.accepting and status.healthy)),
            "temper_engine_training": ("1: a training job runs.", float(self._training())),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that run.", counts.running),
            ("vllm:num_requests_waiting", "Requests that wait.", waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is full.", used_share),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        guesses = counts.guesses
        counters: dict[str, tuple[str, int]] = {
            "vllm:spec_decode_num_drafts": ("Chunks with guessed tokens.", guesses),
            "vllm:spec_decode_num_draft_tokens": ("Guessed tokens.", guesses),
            "vllm:spec_decode_num_accepted_tokens": ("Guessed tokens that were right.", counts.guesses_right),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], count)
            yield counter
        yield from self._adapter_gauges()

    def _adapter_gauges(self) -> Iterator[Metric]:
        snapshot = self._adapters()
        pinned = GaugeMetricFamily(
            "temper_engine_adapter_requests", "Requests pinned to a version.", labels=["adapter"]
        )
        for loaded in snapshot.loaded:
            pinned.add_metric([loaded.pin.version], loaded.requests)
        yield pinned
        attached = GaugeMetricFamily("temper_engine_attached_adapter", "1: the attached version.", labels=["adapter"])
        if snapshot.attached:
            attached.add_metric([snapshot.attached], 1)
        yield attached
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = ",".join(loaded.pin.version for loaded in snapshot.loaded if loaded.requests)
        info.add_metric([str(self._max_loras), running, ""], 1)
        yield info
