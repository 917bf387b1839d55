"""Series that routers and endpoint pickers read of a model server, under vLLM's names.

Engines export them, and a gateway of one engine does for it, since pickers scrape the port that they send requests to.
https://gateway-api-inference-extension.sigs.k8s.io/ (Model Server Protocol)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

VLLM_LABELS = ("model_name", "engine")
"""Labels of vLLM, which dashboards and autoscalers made for it select by."""
VLLM_ENGINE = "0"
"""vLLM numbers the data-parallel replicas of a process; there is one."""


def load_series(model_name: str, running: int, waiting: int, used_share: float) -> Iterator[Metric]:
    """Load of an engine; ``used_share`` is that of its KV blocks, 1 is full."""
    for name, text, value in (
        ("vllm:num_requests_running", "Requests that run.", running),
        ("vllm:num_requests_waiting", "Requests that wait.", waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is full.", used_share),
    ):
        family = GaugeMetricFamily(name, text, labels=VLLM_LABELS)
        family.add_metric([model_name, VLLM_ENGINE], value)
        yield family


def adapter_series(slots: int, serving: Sequence[str], waiting: Sequence[str]) -> Metric:
    """Adapters of an engine: "running" are all in slots, by the names that clients use, so that requests are sent to
    their adapter; the value is a time, and the newest of several counts."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters in slots and adapters that requests wait for; the value is the time of the scrape.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    info.add_metric([str(slots), ",".join(serving), ",".join(waiting)], time.time())
    return info


def cache_series(block_size: int, blocks: int) -> Metric:
    """Size of an engine's KV cache."""
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1: tokens of a KV block and how many blocks there are, which prefix-aware routers size their index by.",
        labels=("block_size", "num_gpu_blocks", "engine"),
    )
    config.add_metric([str(block_size), str(blocks), VLLM_ENGINE], 1)
    return config
