"""/metrics of a gateway with one engine, as endpoint pickers read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Starter
from tests.unit.gateway.fake_engine import FakeEngine


@dataclass
class Endpoint:
    """Facts of an endpoint in llm-d's router (pkg/epp/framework/plugins/datalayer/extractor/metrics: extractor.go,
    loraspec.go, factories.go of its engine type "vllm"), of a pod that has none from earlier scrapes."""

    waiting: int | None = None
    running: int | None = None
    kv_share: float | None = None
    active: set[str] = field(default_factory=set)
    queued: set[str] = field(default_factory=set)
    most: int | None = None
    block_size: int | None = None
    blocks: int | None = None


def picked(text: str) -> Endpoint:
    """What the router takes from an answer: of a family without timestamps the first series, of adapters the one with
    the greatest value; a family that is missing leaves what was known."""
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}

    def first(name: str) -> Sample | None:
        return next(iter(families.get(name, ())), None)

    found = Endpoint()
    if (sample := first("vllm:num_requests_waiting")) is not None:
        found.waiting = int(sample.value)
    if (sample := first("vllm:num_requests_running")) is not None:
        found.running = int(sample.value)
    if (sample := first("vllm:kv_cache_usage_perc")) is not None:
        found.kv_share = sample.value
    if adapters := families.get("vllm:lora_requests_info"):
        labels = max(adapters, key=lambda sample: sample.value).labels
        found.active = {name.strip() for name in labels["running_lora_adapters"].split(",") if name.strip()}
        found.queued = {name.strip() for name in labels["waiting_lora_adapters"].split(",") if name.strip()}
        found.most = int(labels["max_lora"])
    if (sample := first("vllm:cache_config_info")) is not None:
        found.block_size = int(sample.labels["block_size"])
        found.blocks = int(sample.labels["num_gpu_blocks"])
    return found


def eventually(holds: Callable[[], bool]) -> None:
    """Answers are shared for some milliseconds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


BUSY = {
    "running": 7,
    "waiting": 3,
    "blocks_used": 25,
    "blocks_total": 100,
    "serving_adapters": ["tone", "tone@1"],
    "waiting_adapters": ["other"],
    "block_size": 16,
}
SEEN = Endpoint(3, 7, 0.25, {"tone", "tone@1"}, {"other"}, 8, 16, 100)


def test_a_gateway_of_one_engine_says_what_pickers_read_and_never_what_was(start: Starter) -> None:
    """The engine is asked anew, not only when the gateway looks at it by itself."""
    engine = FakeEngine(status=BUSY, adapter_slots=8)
    running = start(engine, status_interval_seconds=3600)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:

        def seen() -> Endpoint:
            return picked(http.get("/metrics").text)

        assert seen() == SEEN
        engine.status = {**BUSY, "waiting": 900}
        eventually(lambda: seen().waiting == 900)
        engine.status = {"running": 1, "blocks_total": 4, "blocks_used": 1}  # of an earlier release
        eventually(lambda: seen() == Endpoint(0, 1, 0.25))
        engine.silent = True
        eventually(lambda: seen() == Endpoint())
        engine.silent = False
        eventually(lambda: seen().running == 1)
        running.run(engine.stop())
        eventually(lambda: seen() == Endpoint())


def test_a_gateway_of_several_engines_says_nothing_of_one(start: Starter) -> None:
    running = start(FakeEngine(status=BUSY), FakeEngine(status=BUSY))
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert picked(http.get("/metrics").text) == Endpoint()
