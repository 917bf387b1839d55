"""Series of an engine under the names of vLLM, for dashboards and autoscalers made for vLLM.

They are made from our own series at each scrape; nothing is counted twice. Names and labels are those of vLLM's
metrics page (https://docs.vllm.ai/en/latest/design/metrics/). `vllm:gpu_*` and `vllm:time_per_output_token_seconds` are
older names, which the dashboards of vLLM's production stack still ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from services.common.telemetry.router_series import VLLM_ENGINE, VLLM_LABELS, cache_series
from services.engine.observability.metrics import EngineMetrics
from services.engine.observability.status import LoopStatus


class VllmCollector(Collector):
    """Collector of the series under vLLM's names.

    Args:
        metrics: metrics of the engine.
        status: returns the status of its loop.
        model_name: name of the base model in requests.
        block_size: tokens of a KV block.
    """

    def __init__(
        self, metrics: EngineMetrics, status: Callable[[], LoopStatus], *, model_name: str, block_size: int
    ) -> None:
        self._status = status
        self._labels = dict(zip(VLLM_LABELS, (model_name, VLLM_ENGINE), strict=True))
        self._block_size = block_size
        self._sources: dict[str, Counter | Histogram] = {
            "vllm:prompt_tokens": metrics.prompt,
            "vllm:generation_tokens": metrics.output,
            "vllm:prefix_cache_queries": metrics.prompt,
            "vllm:prefix_cache_hits": metrics.cached,
            "vllm:gpu_prefix_cache_queries": metrics.prompt,
            "vllm:gpu_prefix_cache_hits": metrics.cached,
            "vllm:num_preemptions": metrics.preemptions,
            "vllm:request_success": metrics.requests,
            "vllm:time_to_first_token_seconds": metrics.first,
            "vllm:request_time_per_output_token_seconds": metrics.each,
            "vllm:time_per_output_token_seconds": metrics.each,
            "vllm:inter_token_latency_seconds": metrics.each,
            "vllm:request_queue_time_seconds": metrics.queue,
            "vllm:e2e_request_latency_seconds": metrics.whole,
            "vllm:request_prefill_time_seconds": metrics.prefill,
            "vllm:request_decode_time_seconds": metrics.decode,
            "vllm:request_inference_time_seconds": metrics.inference,
            "vllm:request_prompt_tokens": metrics.prompt_length,
            "vllm:request_generation_tokens": metrics.output_length,
            "vllm:iteration_tokens_total": metrics.step_length,
        }

    def collect(self) -> Iterator[Metric]:
        """Metrics for the registry."""
        for name, source in self._sources.items():
            for family in source.collect():
                yield self._renamed(family, name)
        counts = self._status().counts
        usage = GaugeMetricFamily(
            "vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", labels=VLLM_LABELS
        )
        usage.add_metric([*self._labels.values()], counts.blocks_used / max(counts.blocks_total, 1))
        yield usage
        yield cache_series(self._block_size, counts.blocks_total)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, f"As {family.name}.", family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.samples.append(
                Sample(
                    name + sample.name.removeprefix(family.name),
                    {**self._labels, **labels},
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
            )
        return renamed


_LABELS = {"finish_reason": "finished_reason"}
