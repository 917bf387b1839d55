"""Prometheus metrics of one engine. The four vllm: gauges are what inference gateways and autoscalers route by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import tracing
from services.common.telemetry.process import export_process
from services.common.telemetry.router_series import VLLM_ENGINE, VLLM_LABELS, adapter_series, load_series
from services.engine.observability.events import (
    AdapterLoadFailed,
    AdapterPhase,
    AdapterPhaseDone,
    CacheChanged,
    EngineEvent,
    GrammarDone,
    LoadFailure,
    RequestDone,
    StepDone,
    StepFailed,
)
from services.engine.observability.offload_metrics import TierMetrics
from services.engine.observability.status import AdapterSnapshot, LoopStatus
from services.engine.requests.outputs import Finished

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_EACH = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_WHOLE = (*_LATENCY, 120.0, 300.0, 600.0)
_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Tokens; those of vLLM's histograms."""

_MASKS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

ASLEEP_METRIC = "temper_engine_asleep"
ASLEEP_TEXT = "1: it has given the memory of the device back and waits to be woken."


class EngineMetrics:
    """Metrics of one engine, counted where an event is emitted, without I/O."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tiers = TierMetrics(registry)
        """Metrics of the prefix cache's tiers."""
        self._evicted_bytes = 0
        export_process(registry, service="engine")
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
        self.prompt = Counter(
            "temper_engine_prompt_tokens",
            "Tokens of prompts that ran, all looked up in the prefix cache; its hits are temper_engine_cached_tokens.",
            registry=registry,
        )
        self.cached = Counter("temper_engine_cached_tokens", "Prompt tokens from the prefix cache.", registry=registry)
        self.output = Counter(
            "temper_engine_output_tokens", "Tokens of answers, counted when they end.", registry=registry
        )
        self.requests = Counter("temper_engine_requests", "Requests ended.", ["finish_reason"], registry=registry)
        self.preemptions = Counter(
            "temper_engine_preemptions", "Sequences that lost their blocks and were recomputed.", registry=registry
        )
        self.queue = Histogram(
            "temper_engine_queue_seconds", "Submission to first step.", registry=registry, buckets=_LATENCY
        )
        self.first = Histogram(
            "temper_engine_time_to_first_token_seconds",
            "Submission to first token.",
            registry=registry,
            buckets=_LATENCY,
        )
        self.each = Histogram(
            "temper_engine_time_per_output_token_seconds",
            "Mean time per output token after the first, a request.",
            registry=registry,
            buckets=_EACH,
        )
        self.whole = Histogram(
            "temper_engine_request_seconds", "Submission to last token.", registry=registry, buckets=_WHOLE
        )
        self.prefill = Histogram(
            "temper_engine_prefill_seconds", "First step to first token.", registry=registry, buckets=_WHOLE
        )
        self.decode = Histogram(
            "temper_engine_decode_seconds", "First token to last token.", registry=registry, buckets=_WHOLE
        )
        self.inference = Histogram(
            "temper_engine_inference_seconds", "First step to last token.", registry=registry, buckets=_WHOLE
        )
        self.prompt_length = Histogram(
            "temper_engine_request_prompt_tokens",
            "Tokens of a request's prompt, cached ones too.",
            registry=registry,
            buckets=_LENGTHS,
        )
        self.output_length = Histogram(
            "temper_engine_request_output_tokens", "Tokens of a request's answer.", registry=registry, buckets=_LENGTHS
        )
        self.step_length = Histogram(
            "temper_engine_step_tokens", "Tokens that a step computes.", registry=registry, buckets=_LENGTHS
        )
        self._swaps = Histogram(
            "temper_engine_adapter_load_seconds",
            "Parts of adapter swaps: download, bind, upload into a slot, flip of the names between two steps.",
            ["phase"],
            registry=registry,
            buckets=_WHOLE,
        )
        self._load_failures = Counter(
            "temper_engine_adapter_load_failures",
            "Versions that could not be loaded: rejected, missing, unavailable, no_slot, error.",
            ["reason"],
            registry=registry,
        )
        # Present from the start, at zero: Prometheus does not see the first increase of a new series.
        for phase in get_args(AdapterPhase):
            self._swaps.labels(phase)
        for reason in get_args(LoadFailure):
            self._load_failures.labels(reason)

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

    def listen(self, event: EngineEvent) -> None:
        """Counts an event of the engine."""
        match event:
            case StepDone():
                self._step_done(event)
            case RequestDone():
                self._request_done(event.finished, event.submitted_at, event.now)
            case StepFailed():
                self._failed.inc()
            case GrammarDone():
                self._grammars.labels(event.result).inc()
                if event.result == "compiled":
                    self._compiling.observe(event.seconds)
            case AdapterPhaseDone():
                self._swaps.labels(event.phase).observe(event.seconds)
            case AdapterLoadFailed():
                self._load_failures.labels(event.reason).inc()
            case CacheChanged():
                pass
            case _:
                self.tiers.listen(event)

    def _step_done(self, stats: StepDone) -> None:
        self._steps.inc()
        self._step.observe(stats.seconds)
        self._compute.observe(stats.compute_seconds)
        self._decoded.inc(stats.decodes)
        self._prefilled.inc(stats.prefill_tokens)
        self.step_length.observe(stats.decodes + stats.prefill_tokens)
        # A new scheduler, after an error, counts from 0 again.
        self.tiers.evicted(None, max(0, stats.counts.evicted_bytes - self._evicted_bytes))
        self._evicted_bytes = stats.counts.evicted_bytes
        if stats.mask_seconds:
            self._masks.observe(stats.mask_seconds)

    def _request_done(self, finished: Finished, submitted_at: float, now: float) -> None:
        example = tracing.exemplar(finished.request.traceparent)
        self.requests.labels(finished.finish_reason.value).inc()
        self.cached.inc(finished.cached_tokens)
        self.tiers.hit(finished.cached_from, finished.cached_tokens, finished.saved_seconds)
        self.preemptions.inc(finished.preemptions)
        if finished.scheduled_at is not None:
            self.prompt.inc(len(finished.request.prompt_token_ids))
            self.queue.observe(finished.scheduled_at - submitted_at, example)
            self.prompt_length.observe(len(finished.request.prompt_token_ids), example)
            self.inference.observe(now - finished.scheduled_at, example)
            if finished.first_token_at is not None:
                self.prefill.observe(finished.first_token_at - finished.scheduled_at, example)
        if finished.first_token_at is not None:
            self.output_length.observe(len(finished.output_ids), example)
            self.decode.observe(now - finished.first_token_at, example)
            self.output.inc(len(finished.output_ids))
            self.first.observe(finished.first_token_at - submitted_at, example)
            self.whole.observe(now - submitted_at, example)
            if len(finished.output_ids) > 1:
                self.each.observe((now - finished.first_token_at) / (len(finished.output_ids) - 1), example)


class StateCollector(Collector):
    """Collector of gauges that are read at each scrape, so that the loop thread does not update them."""

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
            "temper_engine_slots_cached": ("State slots of prefix snapshots alone.", counts.slots_cached),
            "temper_engine_slots_total": ("State slots.", counts.slots_total),
            "temper_engine_ready": ("1: new requests are accepted.", float(status.accepting and status.healthy)),
            "temper_engine_draining": ("1: what runs finishes, nothing new is accepted.", float(not status.accepting)),
            "temper_engine_training": ("1: a training job runs.", float(self._training())),
            ASLEEP_METRIC: (ASLEEP_TEXT, 0.0),  # its process is another while it sleeps
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        yield from load_series(self._model_name, counts.running, waiting, used_share)
        counters: dict[str, tuple[str, int]] = {
            "vllm:spec_decode_num_drafts": ("Chunks with draft tokens.", counts.num_drafts),
            "vllm:spec_decode_num_draft_tokens": ("Draft tokens.", counts.num_draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", counts.num_accepted_tokens),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(name, text, labels=VLLM_LABELS)
            counter.add_metric([self._model_name, VLLM_ENGINE], count)
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
        attached = GaugeMetricFamily(
            "temper_engine_attached_adapter", '1: the attached version; "base" if there is none.', labels=["adapter"]
        )
        attached.add_metric([snapshot.attached or "base"], 1)
        yield attached
        drafter = GaugeMetricFamily(
            "temper_engine_drafter",
            '1: the version of the followed drafter; "own" if there is none.',
            labels=["drafter"],
        )
        drafter.add_metric([snapshot.drafter or "own"], 1)
        yield drafter
        yield GaugeMetricFamily(
            "temper_engine_adapters_loaded", "Published versions in slots.", value=len(snapshot.loaded)
        )
        yield GaugeMetricFamily("temper_engine_adapter_slots", "Slots for adapters.", value=self._max_loras)
        yield adapter_series(self._max_loras, snapshot.serving, snapshot.waiting)
